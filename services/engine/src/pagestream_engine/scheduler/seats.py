"""Seats: how many sequences may run at once."""

from __future__ import annotations

from pagestream_engine.request import SequenceGroup


class Seats:
    """A limit of the sequences that run, beyond which they may be while it was lowered under them.

    Those beyond it leave only by their ends. So a group that displaces others then takes no more places than it would
    at a full batch, and it has to get these, although more than the limit run.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        """Sequences that run at once. It may be set to less while they run, from 1 on."""
        self._kept_for: SequenceGroup | None = None
        self._num_kept = 0

    def limit_for(self, group: SequenceGroup) -> int:
        """Return how many may run at once with a group, once it has started."""
        return max(self.most, self._num_kept) if group is self._kept_for else self.most

    def keep(self, group: SequenceGroup, num_running: int) -> None:
        """Keep as many seats as are taken now for a group, for which some of those that run are about to be displaced.

        They are kept until it starts: it need not be in this step.
        """
        self._num_kept = max(self.limit_for(group), num_running)
        self._kept_for = group

    def note_start(self, group: SequenceGroup) -> None:
        """Note that a group starts, or a part of it."""
        if group is self._kept_for:
            self._kept_for = None
