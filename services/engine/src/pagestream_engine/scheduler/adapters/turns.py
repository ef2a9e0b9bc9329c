"""Which waiting groups may start by their adapters. What may not is set aside, and others go on."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from pagestream_engine.request import Adapter, SequenceGroup, TokenSequence
from pagestream_engine.scheduler.adapters.residency import AdapterResidency
from pagestream_engine.scheduler.policy import Place, WaitingQueue

PASS_LIMIT = 64
"""Groups with adapters that start past a set-aside one before it closes the way to those that rank behind it."""


class AdapterTurns:
    """Lets the next waiting group start whose adapter may run.

    An adapter is active while a sequence with it runs, and while it is read for a group that waits; `max_loras` may be.
    A group whose adapter is not in memory, or finds no free place among the active ones, is set aside. It holds back
    nothing behind it, until PASS_LIMIT groups with adapters have started since: then no other group with an adapter
    that ranks behind it starts before it, so that the running ones end and their places come free. Groups without
    adapters are never set aside.
    """

    def __init__(
        self,
        max_loras: int,
        residency: AdapterResidency,
        waiting: WaitingQueue,
        running: Callable[[], Iterable[TokenSequence]],
    ) -> None:
        """Take groups from `waiting`; `running` returns all admitted sequences."""
        self._max_loras = max_loras
        self._residency = residency
        self._waiting = waiting
        self._running = running
        self._active: set[str] | None = None
        """Revisions; None until they are wanted in this step."""
        self._num_started = 0
        """Groups with adapters."""
        self._since: dict[str, int] = {}
        """`_num_started` when each set-aside adapter's first group was set aside."""
        self._first_overdue: Place | None = None

    def begin(self) -> None:
        """Look anew at what runs, and take back what may start by now."""
        self._active, self._first_overdue = None, None
        lanes = self._waiting.lanes()
        if not lanes:
            self._since.clear()
            return
        self._since = {revision: since for revision, since in self._since.items() if revision in lanes}
        active = self._find_active()
        num_free = self._max_loras - len(active)
        ready: list[str] = []
        for revision, place in sorted(lanes.items(), key=lambda lane: lane[1]):
            if self._residency.is_loading(revision):
                continue
            if revision in active:
                if not self._is_barred(place):
                    ready.append(revision)
            elif num_free > 0:
                num_free -= 1
                ready.append(revision)
            elif self._first_overdue is None and self._num_started - self._since[revision] >= PASS_LIMIT:
                self._first_overdue = place
        for revision in ready:
            del self._since[revision]
            self._waiting.take_back(revision)

    def head(self) -> SequenceGroup | None:
        """Return the next group that may start, which stays, and set those before it aside; None where none may."""
        while (group := self._waiting.peek()) is not None:
            adapter = group.members[0].adapter
            if adapter is None or self._may_start(adapter):
                return group
            self._since.setdefault(adapter.revision, self._num_started)
            self._waiting.set_aside(adapter.revision)
        return None

    def note_start(self, group: SequenceGroup) -> None:
        """Note that the group that `head` has returned starts."""
        revision = group.members[0].adapter_revision
        if revision is not None:
            self._num_started += 1
            self._find_active().add(revision)
            self._residency.touch(revision)

    def _may_start(self, adapter: Adapter) -> bool:
        active, revision = self._find_active(), adapter.revision
        if self._is_barred(self._waiting.head_place):
            return False
        if revision not in active and len(active) >= self._max_loras:
            return False
        if revision in self._residency:
            return True
        if self._residency.begin(adapter, kept=active):
            active.add(revision)
        return False

    def _is_barred(self, place: Place) -> bool:
        return self._first_overdue is not None and place > self._first_overdue

    def _find_active(self) -> set[str]:
        if self._active is None:
            running = {seq.adapter_revision for seq in self._running()}
            loading = {revision for revision in self._waiting.lanes() if self._residency.is_loading(revision)}
            self._active = {revision for revision in running if revision is not None} | loading
        return self._active
