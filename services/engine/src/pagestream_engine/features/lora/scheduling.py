"""Which requests start by their LoRA adapters, and which adapters the executor has in host memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from pagestream_engine.plan import AdapterLoad, LoadedAdapter
from pagestream_engine.request import Adapter, Request, Sequence

if TYPE_CHECKING:
    from pagestream_engine.scheduler.policies import Place, WaitingQueue

PASS_LIMIT = 64
"""Requests with adapters that start past a set-aside one before it closes the way to those that rank behind it."""


class AdapterTurns:
    """Lets the next waiting request start whose adapter may run.

    An adapter is active while a sequence with it runs, and while it is read for a request that waits; `max_loras` may
    be. A request whose adapter is not in memory, or finds no free place among the active ones, is set aside. It holds
    back nothing behind it, until PASS_LIMIT requests with adapters have started since: then no other one with an
    adapter that ranks behind it starts before it, so that the running ones end and their places come free. Requests
    without adapters are never set aside.
    """

    def __init__(
        self,
        max_loras: int,
        residency: AdapterResidency,
        waiting: WaitingQueue,
        running: Iterable[Sequence],
    ) -> None:
        """Take requests from `waiting`; `running` has all admitted sequences."""
        self._max_loras = max_loras
        self._residency = residency
        self._waiting = waiting
        self._running = running
        self._active: set[str] | None = None
        """Revisions; None until they are wanted in this step."""
        self._num_started = 0
        """Requests with adapters."""
        self._since: dict[str, int] = {}
        """`_num_started` when each set-aside adapter's first request was set aside."""
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

    def head(self) -> Request | None:
        """Return the next request that may start, which stays, and set those before it aside; None where none may."""
        while (request := self._waiting.peek()) is not None:
            adapter = request.adapter
            if adapter is None or self._may_start(adapter):
                return request
            self._since.setdefault(adapter.revision, self._num_started)
            self._waiting.set_aside(adapter.revision)
        return None

    def note_start(self, request: Request) -> None:
        """Note that the request that `head` has returned starts."""
        if request.adapter is not None:
            self._num_started += 1
            self._find_active().add(request.adapter.revision)
            self._residency.touch(request.adapter.revision)

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
            running = {seq.adapter_revision for seq in self._running}
            loading = {revision for revision in self._waiting.lanes() if self._residency.is_loading(revision)}
            self._active = {revision for revision in running if revision is not None} | loading
        return self._active


class AdapterResidency:
    """Keeps at most `capacity` adapters in the executor's memory, those that are being read included.

    The executor reads them beside the steps, and evicts what a load names: it decides nothing itself. Loads that were
    begun are sent by who calls `take_loads`, before the plan of the same step.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._resident: OrderedDict[str, None] = OrderedDict()
        """Revisions, the least recently used one first."""
        self._loading: set[str] = set()
        self._unsent: list[AdapterLoad] = []
        self._failed: list[LoadedAdapter] = []

    def __contains__(self, revision: str) -> bool:
        """Whether an adapter's matrices are in memory."""
        return revision in self._resident

    @property
    def is_busy(self) -> bool:
        """Whether an adapter is being read."""
        return bool(self._loading)

    def is_loading(self, revision: str) -> bool:
        """Whether this one is."""
        return revision in self._loading

    def read_ahead(self, adapter: Adapter) -> None:
        """Begin to read an adapter that a request has named, if there is a free place for it."""
        if len(self._resident) + len(self._loading) < self._capacity:
            self.begin(adapter, ())

    def begin(self, adapter: Adapter, kept: Collection[str]) -> bool:
        """Begin to read an adapter, unless it is there or being read already.

        Args:
            adapter: what is wanted.
            kept: revisions that may not be evicted for it.

        Returns:
            False where there is no place for it until another one has been read.
        """
        if adapter.revision in self._resident or adapter.revision in self._loading:
            return True
        evicted = None
        if len(self._resident) + len(self._loading) >= self._capacity:
            evicted = next((revision for revision in self._resident if revision not in kept), None)
            if evicted is None:
                return False
            del self._resident[evicted]
        self._loading.add(adapter.revision)
        self._unsent.append(AdapterLoad(adapter, evicted))
        return True

    def touch(self, revision: str) -> None:
        """Note that an adapter that is in memory is used now."""
        self._resident.move_to_end(revision)

    def take_loads(self) -> list[AdapterLoad]:
        """Return the loads that were begun since the last call."""
        loads, self._unsent = self._unsent, []
        return loads

    def note(self, loaded: LoadedAdapter) -> None:
        """Note what came of a load."""
        self._loading.discard(loaded.revision)
        if loaded.error is None:
            self._resident[loaded.revision] = None
        else:
            self._failed.append(loaded)

    def take_failed(self) -> list[LoadedAdapter]:
        """Return the loads that have failed since the last call."""
        failed, self._failed = self._failed, []
        return failed

    def forget(self) -> None:
        """Forget all: another executor has nothing in memory yet."""
        self._resident.clear()
        self._loading.clear()
        self._unsent.clear()
