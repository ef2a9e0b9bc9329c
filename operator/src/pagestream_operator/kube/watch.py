"""The store's source for one namespace, or for all: kopf's watches, and lists that repair them.

kopf keeps the streams: it lists, watches, and begins again after 410 and lost connections. It runs in a thread with an
event loop of its own, since it takes every task of its loop for one of its own (and cancels them all when it ends), and
the process' signals as well.

kopf ends at what it doesn't retry (404, a second 401, nine failures in a row), and its end takes long, or for ever. So
a run of it is given up before that, and where it has heard nothing for too long, and followed by the next one for as
long as the operator runs. Before each run all kinds are listed here: that shows whether they can be listed at all, and
fills the store without kopf.

kopf does not report an object that ended while no watch was open. So each kind is listed once more when kopf watches
after a list of its own, and every `resync_s`; what such a list lacks is dropped from the store.

`Sight` has a watcher for each namespace, so that what is wrong in one of them concerns no other one.
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import kopf

from pagestream_operator.errors import ApiFailure, ApiUnavailable, Gone, Rejected
from pagestream_operator.kube.client import KubeClient
from pagestream_operator.kube.kinds import WATCHED, Kind
from pagestream_operator.kube.lease import Sees
from pagestream_operator.kube.store import ObjectStore
from pagestream_operator.supervision import run_together, sleep_until

logger = logging.getLogger(__name__)

DEFAULT_WATCH_S = 40.0
_RESTART_S = 2.0
_LONGEST_RESTART_S = 10.0
"""Pauses between runs of kopf, and between lists that fail: nothing is seen meanwhile."""
_LONG_RUN_S = 60.0
"""A run of kopf of so many seconds went well: the next one begins after the shortest pause."""
_SETTLE_S = 1.0
"""After kopf has listed a kind again: time for the events of that list, so that many of them cost one list here."""
_EXIT_S = 3.0
_LOOK_S = 1.0
_UNKNOWN_S = 10.0
"""After the first answer about any kind; by then kopf has asked for the others."""
_HUNG_S = 60.0
"""A thread of kopf that lives for so long after its end hangs. It waits 5 s for tasks of its own."""
_REAP_S = 2.0
_FIRST_ERROR, _UNAUTHORIZED, _FORBIDDEN, _TOO_MANY, _SERVER_ERROR = 300, 401, 403, 429, 500
_REFUSALS = 2
"""Lists that are refused in a row, after which the namespace no longer counts as seen."""
_GRACE_S = 5.0
"""For the start of kopf, and for answers of a busy API server."""
_DEAF_AFTER, _BLIND_AFTER = 2.0, 3.0
"""Without an event or a new watch of a kind for so many times `watch_s`, kopf is started again; without a list, either,
the namespace isn't seen any more. The first is the shorter one, since a new run begins with lists."""


@dataclass(frozen=True)
class Sign:
    """The last thing that was heard of a kind."""

    what: str
    """`event`, `list`, or `watch`: the API server has answered a new watch."""
    at_s: float
    """When, by the monotonic clock."""


class Watcher:
    """Fills a store while `run` runs."""

    def __init__(
        self,
        client: KubeClient,
        store: ObjectStore,
        namespace: str | None,
        registry: kopf.OperatorRegistry,
        *,
        resync_s: float,
        watch_s: float = DEFAULT_WATCH_S,
        on_sight: Callable[[], None] = lambda: None,
        ends: Counter[str] | None = None,
    ) -> None:
        """Prepare; nothing is watched yet.

        Args:
            client: for the lists that repair watches.
            store: what to fill. Its event loop is the one that `run` runs in.
            namespace: which to watch; None for all.
            registry: kopf's handlers, which call the methods of a `KopfRun`, `memo.run`.
            resync_s: seconds between lists of all kinds; 0 lists only where something may have been missed.
            watch_s: seconds after which each watch is begun anew, so that its answer shows that it is alive.
            on_sight: called when all kinds were listed, at first and after each time at which they couldn't be.
            ends: counts ends of this watcher's tasks that nobody asked for.
        """
        self.namespace = namespace
        self.signs: dict[Kind, Sign] = {}
        """The last sign of each kind."""
        self.trouble = ""
        """Why the kinds can't be listed now; "" while they can."""
        self.num_runs = 0
        """Runs of kopf that were begun."""
        self.watch_s = watch_s
        self._client, self._store = client, store
        self._registry, self._resync_s, self._on_sight = registry, resync_s, on_sight
        self._ends = ends
        self._is_listed = self._is_refused = False
        self._suspected: set[tuple[Kind, str | None]] = set()
        """Kinds that are to be listed, and in which namespace; None: in all that this watcher watches."""
        self._wake = asyncio.Event()
        self._repair_pause_s = _RESTART_S
        self._runs: list[KopfRun] = []
        """Those whose threads have not ended yet."""

    @property
    def scope(self) -> str:
        """The namespace, for people."""
        return self.namespace or "all namespaces"

    @property
    def sees(self) -> bool:
        """Whether the store shows this namespace as it is: all kinds were listed, and heard of since."""
        return self._is_listed and not self._is_refused and not self.unheard()

    @property
    def was_tried(self) -> bool:
        """Whether a list has succeeded or failed."""
        return self._is_listed or bool(self.trouble)

    @property
    def num_hung(self) -> int:
        """Threads of kopf that have not ended long after they should have."""
        return sum(run.hangs for run in list(self._runs))

    def unheard(self) -> dict[Kind, float]:
        """Seconds since the last sign of the kinds of which there has been none for too long; inf: none at all."""
        now, limit = time.monotonic(), _BLIND_AFTER * self.watch_s + _GRACE_S
        ages = {kind: now - sign.at_s if (sign := self.signs.get(kind)) else float("inf") for kind in WATCHED}
        return {kind: age for kind, age in ages.items() if age > limit}

    async def run(self, stop: asyncio.Event) -> None:
        """Watch until `stop` is set."""
        works = {
            f"watches of {self.scope}": partial(self._keep_watching, stop),
            f"repair of watches of {self.scope}": partial(self._check, stop),
        }
        await run_together(works, stop, ends=self._ends)

    async def _keep_watching(self, stop: asyncio.Event) -> None:
        pause_s = _RESTART_S
        try:
            while not stop.is_set():
                await self._list_all(stop)
                if stop.is_set():
                    return
                began = time.monotonic()
                await self._watch(stop)
                pause_s = _RESTART_S if time.monotonic() - began >= _LONG_RUN_S else _longer(pause_s)
                await sleep_until(stop, pause_s)
        finally:
            self._wake.set()  # the repair looks at `stop`

    def suspect(self, *kinds: Kind, namespace: str | None = None) -> None:
        """List these kinds soon: the store was found to be wrong about them.

        Args:
            namespace: about those of which one; None: of all that are watched.
        """
        self._suspected.update((kind, namespace or self.namespace) for kind in kinds)
        self._wake.set()

    # -- what was heard

    def hear(self, kind: Kind, what: str) -> None:
        """Note a sign of a kind."""
        self.signs[kind] = Sign(what, time.monotonic())

    def put(self, kind: Kind, body: Mapping[str, Any]) -> None:
        """Store an object that kopf has shown."""
        with _logged(kind, "an object can't be stored"):
            self._store.put(kind, body)

    def drop(self, kind: Kind, body: Mapping[str, Any]) -> None:
        """Drop an object that was deleted."""
        with _logged(kind, "an object can't be dropped"):
            self._store.drop(kind, body)

    # -- runs of kopf

    async def _watch(self, stop: asyncio.Event) -> None:
        """Run kopf until it ends, hears nothing for too long, or `stop` is set."""
        run = KopfRun(self, self._registry, asyncio.get_running_loop())
        self.num_runs += 1
        self._runs = [each for each in self._runs if each.is_alive]
        self._runs.append(run)
        run.start()
        stopping = asyncio.create_task(stop.wait())
        ending = asyncio.create_task(run.ended.wait())
        try:
            while not (stop.is_set() or run.ended.is_set()):
                await asyncio.wait({stopping, ending}, timeout=_LOOK_S, return_when=asyncio.FIRST_COMPLETED)
                silent = run.silent(_DEAF_AFTER * self.watch_s + _GRACE_S)
                if silent and not run.ended.is_set():
                    logger.warning("watches are started again: nothing was heard of %s (%s)", silent, self.scope)
                    break
            run.flag.set()
            await asyncio.wait({ending}, timeout=_EXIT_S)
        finally:
            run.close()
            stopping.cancel()
            ending.cancel()
        if run.ended.is_set() and not stop.is_set():
            logger.warning("the watches of %s have ended, and are started again: %s", self.scope, run.error)

    # -- lists

    async def _list_all(self, stop: asyncio.Event) -> None:
        """List all kinds into the store, however long it takes until that succeeds."""
        pause_s, num_refused = _RESTART_S, 0
        while not stop.is_set():
            try:
                for kind in WATCHED:
                    await self._list(kind, self.namespace)
            except ApiFailure as error:
                # A refusal that lasts ends when somebody grants the right. An API server that has just started refuses
                # for a moment what it will grant; and while no answer comes, what was seen may still hold.
                num_refused = 0 if isinstance(error, ApiUnavailable) else num_refused + 1
                self._is_refused = self._is_refused or num_refused >= _REFUSALS
                self._note_trouble(error)
            else:
                self.trouble, self._is_refused, self._is_listed = "", False, True
                self._on_sight()
                return
            await sleep_until(stop, pause_s)
            pause_s = _longer(pause_s)

    def _note_trouble(self, error: ApiFailure) -> None:
        what = "the API server"
        if isinstance(error, Gone):
            what = "the definition of EnginePool"
        elif not isinstance(error, ApiUnavailable):
            what = f"the right to list what pools have ({self.scope})"
        text = f"waiting for {what}: {error}"
        logger.log(logging.DEBUG if text == self.trouble else logging.WARNING, "%s", text)
        self.trouble = text

    async def _check(self, stop: asyncio.Event) -> None:
        resync_at_s = time.monotonic() + self._resync_s
        while not stop.is_set():
            try:
                async with asyncio.timeout(max(0.0, resync_at_s - time.monotonic()) if self._resync_s else None):
                    await self._wake.wait()
                await sleep_until(stop, _SETTLE_S)
            except TimeoutError:
                self._suspected = {(kind, self.namespace) for kind in WATCHED}
                resync_at_s = time.monotonic() + self._resync_s
            self._wake.clear()
            suspected, self._suspected = self._suspected, set()
            if self.trouble or stop.is_set():
                continue  # all kinds are listed as soon as they can be
            await self._repair(suspected)

    async def _repair(self, suspected: set[tuple[Kind, str | None]]) -> None:
        # A list of all namespaces has those of one, too.
        left = {(kind, place) for kind, place in suspected if place is None or (kind, None) not in suspected}
        try:
            for kind, place in tuple(left):
                try:
                    await self._list(kind, place)
                    left.discard((kind, place))
                except (Gone, Rejected) as error:  # which may concern this kind alone
                    logger.warning("can't list %s, will try again: %s", kind.plural, error)
        except ApiFailure as error:
            logger.warning("can't list what watches may have missed, will try again: %s", error)
        if not left:
            self._repair_pause_s = _RESTART_S
            return
        self._suspected |= left
        asyncio.get_running_loop().call_later(self._repair_pause_s, self._wake.set)
        self._repair_pause_s = _longer(self._repair_pause_s)

    async def _list(self, kind: Kind, namespace: str | None) -> None:
        """List a kind in a namespace once, into the store; None: in all. Raises ApiFailure."""
        suspects = self._store.versions(kind, namespace)
        listed = await self._client.list(kind, namespace)
        if namespace == self.namespace:  # else it says nothing about the other namespaces
            self.hear(kind, "list")
        for body in listed:  # those of a list have neither; those of events have both
            body |= {"apiVersion": kind.api_version, "kind": kind.name}
        with _logged(kind, "a list can't be stored"):
            changes = self._store.apply_list(kind, listed, suspects)
            if changes.dropped:
                counted = {"kind": kind.name, "count": changes.dropped}
                logger.info("dropped objects whose end no watch reported", extra=counted)
            if changes.rewound and self._runs:  # kopf would wait for versions that come much later, or not at all
                self._runs[-1].give_up("the API server's data is older than what was seen")


@contextmanager
def _logged(kind: Kind, what: str) -> Iterator[None]:
    """Log an error of the store, which must not end what fills it."""
    try:
        yield
    except Exception:
        logger.exception(what, extra={"kind": kind.name})


class KopfRun:
    """One run of kopf in a thread of its own. What it reports after its end is ignored."""

    def __init__(self, watcher: Watcher, registry: kopf.OperatorRegistry, loop: asyncio.AbstractEventLoop) -> None:
        self.flag = threading.Event()
        """Ends it."""
        self.ended = asyncio.Event()
        self.error = "kopf returned"
        """How it has ended."""
        self.watch_s = watcher.watch_s
        self._watcher, self._registry, self._loop = watcher, registry, loop
        self._paths = {kind.path(watcher.namespace): kind for kind in WATCHED}
        self._began_s = time.monotonic()
        self._heard_s: dict[Kind, float] = {}
        self._failures: Counter[Kind] = Counter()
        """In a row; by kopf's thread."""
        self._ending: asyncio.Event
        self._listed: set[Kind] = set()
        self._known: set[Kind] = set()
        self._first_s: float | None = None
        """When it was heard of the first kind, and of which ones since."""
        self._is_closed = False
        self._closed_s = 0.0
        self._thread = threading.Thread(target=self._run, name=f"kopf {watcher.scope}", daemon=True)

    def start(self) -> None:
        """Start the thread, which nobody has to join."""
        self._thread.start()

    def close(self) -> None:
        """End it, and take nothing more from it."""
        self.flag.set()
        self._is_closed = True
        self._closed_s = time.monotonic()

    @property
    def is_alive(self) -> bool:
        """Whether its thread has not ended."""
        return self._thread.is_alive()

    @property
    def hangs(self) -> bool:
        """Whether its thread should have ended long ago."""
        return self._is_closed and self.is_alive and time.monotonic() - self._closed_s > _HUNG_S

    def silent(self, limit_s: float) -> str:
        """The kinds of which neither an event nor a new watch has come for longer than a limit; "" for none."""
        now = time.monotonic()
        ages = {kind: now - self._heard_s.get(kind, self._began_s) for kind in WATCHED}
        silent = {kind: age for kind, age in ages.items() if age > limit_s}
        if self._first_s is not None and now - self._first_s > _UNKNOWN_S:
            # kopf asks once which kinds there are, and watches none that wasn't there, as that of a new definition.
            silent |= {kind: ages[kind] for kind in WATCHED if kind not in self._known}
        return ", ".join(f"{kind.plural} for {age:.0f} s" for kind, age in silent.items())

    # -- in kopf's thread

    def store_object(self, kind: Kind, body: Mapping[str, Any]) -> None:
        """Store an object as it is now."""
        self._post(self._watcher.put, kind, body)

    def observe_event(self, kind: Kind, change: str | None, body: Mapping[str, Any]) -> None:
        """Note an event: ADDED, MODIFIED or DELETED; None for an object of a list."""
        if change is not None:
            self._post(self._observed, kind, change, body)

    def note_answer(self, path: str, is_watch: bool, status: int) -> bool:
        """Note that the API server has answered a list or the beginning of a watch.

        Args:
            path: of its URL, without what the address of the API server adds.
            status: 0 where there was no answer.

        Returns:
            Whether to keep the answer from kopf, since the run was given up because of it.
        """
        kind = self._paths.get(path)
        if 0 < status < _FIRST_ERROR:
            if kind is not None:
                self._failures[kind] = 0
                self._post(self._answered, kind, is_watch)
            return False
        if status == _UNAUTHORIZED:
            self.give_up("the API server doesn't take the token (401)")
            return True
        if kind is None or status == _TOO_MANY:
            return False
        self._failures[kind] += 1
        if self._failures[kind] < _most_failures(status):
            return False
        self.give_up(f"{kind.plural}: {f'status {status}' if status else 'no answer'}")
        return True

    def give_up(self, why: str) -> None:
        """Count the run as ended: kopf can't go on, and takes its time to notice that."""
        self._post(self._give_up, why)

    def note_end(self) -> None:
        """Note that kopf ends its watches."""
        self._ending.set()
        self.give_up("kopf has ended its watches")

    def _run(self) -> None:
        try:
            asyncio.run(self._operate())
        except BaseException as error:  # noqa: BLE001 - the thread ends in any case, and its end is reported
            self.error = f"{type(error).__name__}: {error}"
        finally:
            self._post(self.ended.set, always=True)

    async def _operate(self) -> None:
        memo = kopf.Memo(run=self, sessions=[])
        namespace = self._watcher.namespace
        self._ending = asyncio.Event()
        reaping = asyncio.create_task(self._reap(asyncio.current_task()), name="reaper")
        try:
            await kopf.operator(
                registry=self._registry,
                memo=memo,
                standalone=True,
                clusterwide=namespace is None,
                namespaces=() if namespace is None else (namespace,),
                stop_flag=self.flag,
            )
        except BaseException as error:
            self.error = f"{type(error).__name__}: {error}"
            raise
        finally:
            # kopf waits for the flag in a thread of its loop, which joins that thread before it closes.
            self.flag.set()
            reaping.cancel()
            self._post(self.ended.set, always=True)
            for session in memo.sessions:
                await session.close()

    async def _reap(self, operating: asyncio.Task[Any] | None) -> None:
        """End what kopf leaves behind when it ends by an error, and would wait for without a limit.

        A watch takes its cancellation for a pause where the task that waits for pauses is cancelled as well, and then
        waits for a login that nobody makes any more.
        """
        await self._ending.wait()
        while True:
            await asyncio.sleep(_REAP_S)
            for task in asyncio.all_tasks() - {operating, asyncio.current_task()}:
                if not task.get_name().startswith("pause-waiter"):
                    task.cancel()

    def _post(self, callback: Callable[..., object], *arguments: Any, always: bool = False) -> None:
        """Call in the store's event loop, in the order of the posts."""

        def call() -> None:
            if always or not self._is_closed:
                callback(*arguments)

        try:
            self._loop.call_soon_threadsafe(call)
        except RuntimeError:
            logger.debug("an event came after the end of the store's event loop")

    # -- in the store's event loop

    def _observed(self, kind: Kind, change: str, body: Mapping[str, Any]) -> None:
        self._heard_s[kind] = time.monotonic()
        self._watcher.hear(kind, "event")
        if change == "DELETED":
            self._watcher.drop(kind, body)

    def _answered(self, kind: Kind, is_watch: bool) -> None:
        self._watcher.hear(kind, "watch" if is_watch else "list")
        self._known.add(kind)
        self._first_s = time.monotonic() if self._first_s is None else self._first_s
        if not is_watch:
            self._listed.add(kind)
            return
        self._heard_s[kind] = time.monotonic()
        if kind in self._listed:  # what ended before that list, no event reports
            self._listed.discard(kind)
            self._watcher.suspect(kind)

    def _give_up(self, why: str) -> None:
        if not self.ended.is_set():
            self.error = why
            self.ended.set()


def _most_failures(status: int) -> int:
    """How many failures of one kind in a row are left to kopf, which ends at the last one."""
    if status == _FORBIDDEN:
        return 3
    return 6 if status == 0 or status >= _SERVER_ERROR else 1


def _longer(pause_s: float) -> float:
    return min(_LONGEST_RESTART_S, 2 * pause_s) * (0.8 + 0.2 * random.random())


_MOST_HUNG = 3
"""Threads of kopf that hang at once, after which only a new process helps."""


class Sight:
    """Fills a store from all namespaces while `run` runs."""

    def __init__(
        self,
        client: KubeClient,
        store: ObjectStore,
        namespaces: tuple[str, ...] | None,
        registry: kopf.OperatorRegistry,
        *,
        resync_s: float,
        watch_s: float = DEFAULT_WATCH_S,
        on_sight: Callable[[], None] = lambda: None,
        ends: Counter[str] | None = None,
    ) -> None:
        """Prepare; nothing is watched yet.

        Args:
            namespaces: which to watch; None for all, by one watcher.
            ends: counts ends of watchers that nobody asked for.
        """
        self.watchers = {
            namespace: Watcher(
                client, store, namespace, registry, resync_s=resync_s, watch_s=watch_s, on_sight=on_sight, ends=ends
            )
            for namespace in namespaces or (None,)
        }
        """By namespace; None: of all."""
        self._ends = ends

    async def run(self, stop: asyncio.Event) -> None:
        """Watch until `stop` is set."""
        works = {f"watcher of {each.scope}": partial(each.run, stop) for each in self.watchers.values()}
        await run_together(works, stop, ends=self._ends)

    def suspect(self, namespace: str, *kinds: Kind) -> None:
        """List these kinds of one namespace soon: the store was found to be wrong about them."""
        watcher = self.watchers.get(namespace) or self.watchers.get(None)
        if watcher is not None:
            watcher.suspect(*kinds, namespace=namespace)

    def shows(self, namespace: str) -> bool:
        """Whether the store shows a namespace as it is."""
        watcher = self.watchers.get(namespace) or self.watchers.get(None)
        return watcher is not None and watcher.sees

    @property
    def extent(self) -> Sees:
        """How much of its namespaces this replica sees."""
        seen = [watcher.sees for watcher in self.watchers.values()]
        if all(seen):
            return Sees.ALL
        return Sees.SOME if any(seen) else Sees.NOTHING

    def problem(self) -> str:
        """Why nothing is seen; "" where something is."""
        if self.extent is not Sees.NOTHING:
            return ""
        return "nothing is seen: " + "; ".join(map(_trouble, self.watchers.values()))

    def hang(self) -> str:
        """Why only a new process helps; "" where none is needed."""
        hung = sum(watcher.num_hung for watcher in self.watchers.values())
        return f"{hung} threads of kopf hang" if hung >= _MOST_HUNG else ""

    def report(self) -> Iterator[str]:
        """A line for each namespace: what was heard last of each kind, and how long ago; or what is wrong."""
        now = time.monotonic()
        for watcher in self.watchers.values():
            signs = [(kind.name, watcher.signs.get(kind)) for kind in WATCHED]
            heard = ", ".join(f"{name} {sign.what} {now - sign.at_s:.0f} s" for name, sign in signs if sign is not None)
            state = "seen" if watcher.sees else f"not seen ({_trouble(watcher)})"
            yield f"{watcher.scope}: {state}; {heard or 'nothing heard'}"


def _trouble(watcher: Watcher) -> str:
    if watcher.trouble:
        return f"{watcher.scope}: {watcher.trouble}"
    unheard = watcher.unheard()
    if unheard and all(age < float("inf") for age in unheard.values()):
        ages = ", ".join(f"{kind.plural} for {age:.0f} s" for kind, age in unheard.items())
        return f"{watcher.scope}: nothing heard of {ages}"
    return f"{watcher.scope}: starting"
