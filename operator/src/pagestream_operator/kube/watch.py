"""The store's source: kopf's watches, and lists that repair them.

kopf keeps the streams: it lists, watches, and begins again after 410 and lost connections. It runs in a thread with an
event loop of its own, since it takes every task of its loop for one of its own (and cancels them all when it ends), and
the process' signals as well.

kopf does not report an object that ended while no watch was open. So each kind is listed once more when kopf has listed
it again, and every `resync_s`; what such a list lacks is dropped from the store.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

import kopf

from pagestream_operator.errors import ApiFailure, Gone
from pagestream_operator.kube.client import KubeClient
from pagestream_operator.kube.kinds import POOL, WATCHED, Kind
from pagestream_operator.kube.store import ObjectStore

logger = logging.getLogger(__name__)

_RESTART_S = 2.0
_SETTLE_S = 1.0
"""After kopf has listed a kind again: time for the events of that list, so that many of them cost one list here."""
_EXIT_S = 3.0


class Watcher:
    """Fills a store while `run` runs."""

    def __init__(
        self,
        client: KubeClient,
        store: ObjectStore,
        namespaces: tuple[str, ...] | None,
        registry: kopf.OperatorRegistry,
        *,
        resync_s: float,
    ) -> None:
        """Prepare; nothing is watched yet.

        Args:
            client: for the lists that repair watches.
            store: what to fill. Its event loop is the one that `run` runs in.
            namespaces: which to watch; None for all.
            registry: kopf's handlers, which call `store_object` and `observe_event` of `memo.watcher`.
            resync_s: seconds between lists of all kinds; 0 lists only where something may have been missed.
        """
        self.synced = asyncio.Event()
        """Set when all kinds were listed."""
        self.defined = asyncio.Event()
        """Set when the API server serves EnginePool."""
        self._client, self._store, self._namespaces = client, store, namespaces
        self._registry, self._resync_s = registry, resync_s
        self._listed: dict[Kind, set[str]] = {kind: set() for kind in WATCHED}
        self._suspected: set[Kind] = set()
        self._wake = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop

    async def run(self, stop: asyncio.Event) -> None:
        """Watch until `stop` is set."""
        checking = asyncio.create_task(self._check(stop), name="lists that repair watches")
        try:
            while not stop.is_set():
                await self._wait_for_definition(stop)
                if not stop.is_set():
                    await self._watch(stop)
        finally:
            checking.cancel()
            await asyncio.gather(checking, return_exceptions=True)

    def suspect(self, *kinds: Kind) -> None:
        """List these kinds soon: the store was found to be wrong about them."""
        self._suspected.update(kinds)
        self._wake.set()

    # -- called by kopf's handlers, in kopf's thread

    def store_object(self, kind: Kind, body: Mapping[str, Any]) -> None:
        """Store an object."""
        self._post(self._store.put, kind, body)

    def observe_event(self, kind: Kind, change: str | None, body: Mapping[str, Any]) -> None:
        """Note an event: ADDED, MODIFIED or DELETED; None for an object of a list."""
        self._post(self._observe, kind, change, body)

    def _post(self, callback: Callable[..., object], *arguments: Any) -> None:
        """Call in the store's event loop, in the order of the posts."""
        try:
            self._loop.call_soon_threadsafe(callback, *arguments)
        except RuntimeError:
            logger.debug("an event came after the end of the store's event loop")

    def _observe(self, kind: Kind, change: str | None, body: Mapping[str, Any]) -> None:
        self.synced.set()
        listed, uid = self._listed[kind], body["metadata"]["uid"]
        if change == "DELETED":
            listed.discard(uid)
            self._store.drop(kind, body)
        elif change is None and uid in listed:
            self.suspect(kind)  # listed a second time: the watch was interrupted
        else:
            listed.add(uid)

    # -- kopf's thread

    async def _watch(self, stop: asyncio.Event) -> None:
        """Run kopf until it gives up, or `stop` is set."""
        self._loop = asyncio.get_running_loop()
        ended, flag = asyncio.Event(), threading.Event()

        def run() -> None:
            try:
                asyncio.run(self._run_kopf(flag))
            except Exception as error:  # noqa: BLE001 - whatever kopf raises, it is started again
                logger.warning("the watches have failed and are started again: %s", error)
            finally:
                self._post(ended.set)

        threading.Thread(target=run, name="kopf", daemon=True).start()
        stopping = asyncio.create_task(stop.wait())
        ending = asyncio.create_task(ended.wait())
        try:
            await asyncio.wait({stopping, ending}, return_when=asyncio.FIRST_COMPLETED)
            flag.set()
            await asyncio.wait({ending}, timeout=_EXIT_S)
        finally:
            flag.set()
            stopping.cancel()
            ending.cancel()
        if not stop.is_set():
            self.suspect(*WATCHED)
            await _sleep(_RESTART_S, stop)

    async def _run_kopf(self, flag: threading.Event) -> None:
        await kopf.operator(
            registry=self._registry,
            memo=kopf.Memo(watcher=self),
            standalone=True,
            clusterwide=self._namespaces is None,
            namespaces=self._namespaces or (),
            stop_flag=flag,
        )

    async def _wait_for_definition(self, stop: asyncio.Event) -> None:
        """Wait until EnginePool can be listed: kopf looks once for the kinds that there are."""
        has_warned = False
        while not stop.is_set():
            try:
                for namespace in self._namespaces or (None,):
                    await self._client.list(POOL, namespace)
                self.defined.set()
                return
            except ApiFailure as error:
                what = "the definition of EnginePool" if isinstance(error, Gone) else "the API server"
                logger.log(logging.DEBUG if has_warned else logging.WARNING, "waiting for %s: %s", what, error)
                has_warned = True
                await _sleep(_RESTART_S, stop)

    # -- lists that repair watches

    async def _check(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            try:
                async with asyncio.timeout(self._resync_s or None):
                    await self._wake.wait()
                await _sleep(_SETTLE_S, stop)
            except TimeoutError:
                self._suspected.update(WATCHED)
            self._wake.clear()
            kinds, self._suspected = self._suspected, set()
            for kind in kinds:
                await self._settle(kind)

    async def _settle(self, kind: Kind) -> None:
        for namespace in self._namespaces or (None,):
            suspects = self._store.uids(kind, namespace)
            try:
                listed = await self._client.list(kind, namespace)
            except ApiFailure as error:
                logger.warning("can't list %s, will try again: %s", kind.plural, error)
                self._suspected.add(kind)
                asyncio.get_running_loop().call_later(_RESTART_S, self._wake.set)
                return
            missed = self._store.settle(kind, listed, suspects)
            if missed:
                logger.info("dropped objects whose end no watch reported", extra={"kind": kind.name, "count": missed})


async def _sleep(seconds: float, stop: asyncio.Event) -> None:
    try:
        async with asyncio.timeout(seconds):
            await stop.wait()
    except TimeoutError:
        return
