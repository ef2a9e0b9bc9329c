"""Which adapters the executor has in host memory: what it is to read next, and what gives way to it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection

from pagestream_engine.plan import AdapterLoad, LoadedAdapter
from pagestream_engine.request import Adapter


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
