"""What each rung means for the parts of an engine, by what is short."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from pagestream_worker.ladder.ladder import Ladder, Pace, Resource, Rung, Shares, Watermarks


class Rungs(NamedTuple):
    """Of three ladders, each of which watches more: what gives up work has to free what is short."""

    blocks: Rung
    """For want of KV blocks alone."""
    own: Rung
    """For want of these or the host's memory: all that this engine has."""
    all: Rung
    """For want of anything: the rung that is published."""


class Ladders:
    """The three ladders of an engine.

    Args:
        marks: of each resource.
    """

    def __init__(self, marks: Mapping[Resource, Watermarks], pace: Pace) -> None:
        own = {each: marks[each] for each in (Resource.DEVICE, Resource.HOST)}
        self._blocks = Ladder({Resource.DEVICE: marks[Resource.DEVICE]}, pace)
        self._own = Ladder(own, pace)
        self._all = Ladder(marks, pace)

    @property
    def rung(self) -> Rung:
        """The highest of the three."""
        return self._all.rung

    def update(self, shares: Shares, elapsed_s: float) -> Rungs:
        """Return the rungs after so many seconds with these shares."""
        return Rungs(*(each.update(shares, elapsed_s) for each in (self._blocks, self._own, self._all)))

    def short(self, shares: Shares) -> list[Resource]:
        """Return the resources above their high watermark."""
        return self._all.short(shares)


class Effects(NamedTuple):
    """What is in force at some rungs."""

    claims_ahead: bool
    """Whether prompts are claimed while others are being computed."""
    keeps_cache: bool
    """Whether evicted blocks are saved to host memory, and acknowledged log entries are kept in memory."""
    greatest_class: int | None
    """Of the new requests that an engine with others claims; None: all."""
    refused_class: int | None
    """The least class that gateways are asked to refuse; None: none."""


NO_EFFECTS = Effects(claims_ahead=True, keeps_cache=True, greatest_class=None, refused_class=None)


def effects_at(rungs: Rungs) -> Effects:
    """Return the effects of these rungs, with those of the rungs below them.

    A class is left in the queue only for want of the engine's own memory: what waits there fills Redis, and only
    running it frees that.
    """
    greatest = 0 if rungs.own >= Rung.LEAVE_CLASS_1 else 1 if rungs.own >= Rung.LEAVE_CLASS_2 else None
    refused = 1 if rungs.all >= Rung.REFUSE_CLASS_1 else 2 if rungs.all >= Rung.REFUSE_CLASS_2 else None
    return Effects(
        claims_ahead=rungs.all < Rung.NO_PREFETCH,
        keeps_cache=rungs.all < Rung.SMALL_CACHE,
        greatest_class=greatest,
        refused_class=refused,
    )


class BatchLimit:
    """Sequences that may run at once, on the rungs of the ladder that watches blocks.

    Each climb from SMALL_BATCH on, since blocks are still short, takes a quarter of what runs then; half of the limit
    at most is left, and a quarter at least.
    """

    def __init__(self, max_num_seqs: int) -> None:
        self._max_num_seqs = max_num_seqs
        self._rung = Rung.NORMAL
        self.most = max_num_seqs
        """In force."""

    def update(self, rung: Rung, num_running: int) -> None:
        """Set `most` for a rung, while so many sequences run."""
        before, self._rung = self._rung, rung
        if rung < Rung.SMALL_BATCH:
            self.most = self._max_num_seqs
        elif rung > before:
            lowered = min(self._max_num_seqs // 2, num_running * 3 // 4)
            self.most = max(1, self._max_num_seqs // 4, lowered)
