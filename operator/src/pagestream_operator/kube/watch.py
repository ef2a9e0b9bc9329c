"""Watches, by kopf: what the API server shows goes into the store.

kopf keeps the streams (lists, watches, begins again after 410 and lost connections) and holds events back until all
kinds were listed once. Its own bookkeeping on objects is not used, so that it writes nothing: every replica of the
operator may watch. It runs in a thread with an event loop of its own, since it takes every task of its loop for one of
its own, and the process' signals as well.

What it does not tell is an object that ended while no watch was open; so when a kind was listed again, or some time has
passed, it is listed here and what isn't there any more is dropped.
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

_RETRY_S = (0.5, 1.0, 2.0, 2.0, 2.0, 5.0, 5.0, 5.0)
"""Between tries of a list or watch. Short, since a lost watch is blindness; then the stream begins again from a
list."""
_RESTART_S = 2.0
_SETTLE_S = 1.0  # after a list was begun again: time for its events, so that many of them cost one list of ours
_EXIT_S = 3.0
_DEPLETE_S = 0.5


class Watcher:
    """Fills `store` while it runs. `synced` is set when all kinds were listed."""

    def __init__(
        self, client: KubeClient, store: ObjectStore, namespaces: tuple[str, ...] | None, *, resync_s: float
    ) -> None:
        """`namespaces` None: all of them. `resync_s` 0: never without a reason."""
        self.synced = asyncio.Event()
        self.defined = asyncio.Event()
        """Set when the API server knows EnginePool."""
        self.restarts = 0
        """How often kopf gave up and was begun again."""
        self.missed = 0
        """Objects whose end no watch has told."""
        self._client, self._store, self._namespaces, self._resync_s = client, store, namespaces, resync_s
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
        """Have these kinds listed soon: something about them was not as the store says."""
        self._suspected.update(kinds)
        self._wake.set()

    async def _watch(self, stop: asyncio.Event) -> None:
        """Until kopf gives up, or `stop` is set."""
        self._loop = asyncio.get_running_loop()
        ended, flag = asyncio.Event(), threading.Event()

        def run() -> None:
            try:
                asyncio.run(self._run_kopf(flag))
            except Exception as error:  # noqa: BLE001 - whatever kopf met, watching must go on
                logger.warning("watching has failed and begins again: %s", error)
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
            self.restarts += 1
            self.suspect(*WATCHED)
            await _sleep(_RESTART_S, stop)

    async def _run_kopf(self, flag: threading.Event) -> None:
        """In the thread."""
        await kopf.operator(
            registry=self._registry(),
            settings=_kopf_settings(),
            standalone=True,
            clusterwide=self._namespaces is None,
            namespaces=self._namespaces or (),
            stop_flag=flag,
        )

    def _post(self, callback: Callable[..., object], *arguments: Any) -> None:
        """From the thread into the loop of the store, in order."""
        try:
            self._loop.call_soon_threadsafe(callback, *arguments)
        except RuntimeError:
            logger.debug("the loop has ended before the watches")

    async def _wait_for_definition(self, stop: asyncio.Event) -> None:
        """kopf looks once for the kinds that there are."""
        told = False
        while not stop.is_set():
            try:
                for namespace in self._namespaces or (None,):
                    await self._client.list(POOL, namespace)
                self.defined.set()
                return
            except ApiFailure as error:
                what = "the definition of EnginePool" if isinstance(error, Gone) else "the API server"
                logger.log(logging.DEBUG if told else logging.WARNING, "waiting for %s: %s", what, error)
                told = True
                await _sleep(_RESTART_S, stop)

    def _registry(self) -> kopf.OperatorRegistry:
        registry = kopf.OperatorRegistry()

        @kopf.on.login(registry=registry)
        def login(**given: Any) -> kopf.ConnectionInfo | None:
            return kopf.login_with_service_account(**given) or kopf.login_with_kubeconfig(**given)

        for kind in WATCHED:
            self._register(kind, registry)
        return registry

    def _register(self, kind: Kind, registry: kopf.OperatorRegistry) -> None:
        place = (kind.group, kind.version, kind.plural)

        # An index, since kopf holds all events back until everything listed has passed through the indexes.
        @kopf.index(*place, id=f"index-{kind.plural}", registry=registry)
        async def take(body: Mapping[str, Any], **_: Any) -> None:
            self._post(self._store.put, kind, _plain(body))

        @kopf.on.event(*place, id=f"event-{kind.plural}", registry=registry)
        async def see(event: Mapping[str, Any], **_: Any) -> None:
            self._post(self._see, kind, event["type"], event["object"])

    def _see(self, kind: Kind, change: str | None, body: Mapping[str, Any]) -> None:
        self.synced.set()
        listed, uid = self._listed[kind], body["metadata"]["uid"]
        if change == "DELETED":
            listed.discard(uid)
            self._store.drop(kind, body)
        elif change is None and uid in listed:
            self.suspect(kind)
        else:
            listed.add(uid)

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
            self.missed += missed
            if missed:
                logger.info("ends that no watch has told", extra={"kind": kind.name, "count": missed})


def _plain(body: Mapping[str, Any]) -> dict[str, Any]:
    return {name: body[name] for name in body}


def _kopf_settings() -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    settings.scanning.disabled = True
    settings.posting.enabled = False
    settings.networking.error_backoffs = _RETRY_S
    settings.networking.request_timeout = 30.0
    settings.networking.connect_timeout = 5.0
    settings.watching.chunk_size = 500
    settings.queueing.idle_timeout = 0.5
    settings.process.ultimate_exiting_timeout = None
    settings.queueing.exit_timeout = _DEPLETE_S
    for kind in WATCHED:
        if kind.label_selector is not None:
            settings.watching.label_selectors[kind.group, kind.version, kind.plural] = kind.label_selector
    return settings


async def _sleep(seconds: float, stop: asyncio.Event) -> None:
    try:
        async with asyncio.timeout(seconds):
            await stop.wait()
    except TimeoutError:
        return
