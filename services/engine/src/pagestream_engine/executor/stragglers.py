"""Find a rank that hangs: the others wait for it."""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic

from pagestream_engine.parallel.place import Progress

HANG_LIMIT_S = 1.5
"""Of a rank behind the others of its stage, without progress. They do the same work between two exchanges."""
REMOTE_LIMIT_S = 5.0
"""Of one on another machine, whose progress comes with heartbeats, in their time without a byte."""
COLLECTIVE_LIMIT_S = 5.0
"""Of all ranks of a stage within one collective: a slow network, or a machine without processor time for a rank."""
STAGE_LIMIT_S = 10.0
"""Of a stage for which others wait, between two layers: no other does the same work."""
_FIRST_LIMIT_S = 60.0
"""Of the first step, in which a rank may import or compile what it has not used before."""


class Stragglers:
    """Watches a group while a step is waited for.

    A rank hangs if it stays behind the others of its stage, by the collectives that it has begun and ended or by its
    answer to the step, for `limit_s`. Where all are as far as each other and in a collective, none computes: one of
    them hangs in it, the others wait for its data, and the first is named after COLLECTIVE_LIMIT_S or longer. Where all
    compute, that has no limit here in a group of one stage. Of several, the first one that has not answered is named
    where no rank has got on for STAGE_LIMIT_S or longer: later ones wait for it. With drafts it may itself wait for the
    last one.

    Args:
        num_local: ranks of this machine, the first ones; None: all.
    """

    def __init__(self, progress: Progress, stage_size: int, num_local: int | None = None) -> None:
        self._progress = progress
        self._stage_size = stage_size
        self._num_local = num_local
        self.waited_s = 0.0
        """How long the rank that was found has made no progress."""
        self._longest_s: float | None = None
        self._began = 0.0
        self._last: tuple[bool, int, int] | None = None
        """Whether the hindmost rank is behind, the rank, and its count; the sum of all counts where all compute."""
        self._since = 0.0

    @property
    def limit_s(self) -> float:
        """Seconds: as long as the longest step so far took, and as long as the others took in this one, on a machine
        where that is more."""
        if self._longest_s is None:
            return _FIRST_LIMIT_S
        return max(HANG_LIMIT_S, self._longest_s, self._since - self._began)

    def begin(self) -> None:
        """Begin to wait for a step."""
        self._began, self._last = monotonic(), None

    def end(self) -> None:
        """Note that the step has been answered by all ranks."""
        self._longest_s = max(self._longest_s or 0.0, monotonic() - self._began)

    def find(self, waiting: Sequence[int]) -> int | None:
        """Return the rank that hangs, None while none does.

        Args:
            waiting: ranks that have not answered.
        """
        counts = self._progress.counts()
        first = waiting[0] - waiting[0] % self._stage_size
        stage = range(first, first + self._stage_size)
        count, rank = min((counts[rank], rank) for rank in waiting if rank in stage)
        is_behind = any(each not in waiting or counts[each] > count for each in stage)
        # Begins and ends both count: a rank that stopped within a collective is behind no other rank.
        is_in_collective = count % 2 == 1
        is_waited_for = len(counts) > self._stage_size
        is_remote = self._num_local is not None and rank >= self._num_local
        behind_s = REMOTE_LIMIT_S if is_remote else HANG_LIMIT_S
        least_s = behind_s if is_behind else COLLECTIVE_LIMIT_S if is_in_collective else STAGE_LIMIT_S
        if not (is_behind or is_in_collective or is_waited_for):
            self._last = None
        elif (seen := (is_behind, rank, count if is_behind or is_in_collective else sum(counts))) != self._last:
            self._last, self._since = seen, monotonic()
        elif monotonic() - self._since > max(self.limit_s, least_s):
            self.waited_s = monotonic() - self._since
            return rank
        return None
