"""The pools of this operator: one task each, which makes a pass at each change and once a second."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping

from pagestream_operator.errors import ApiFailure, Blocked, Conflict, Gone, NotLeading, OperatorError, Rejected
from pagestream_operator.kube.kinds import DEPLOYMENT, POOL
from pagestream_operator.kube.store import PoolKey
from pagestream_operator.pool.reconciler import Context, Reconciler

logger = logging.getLogger(__name__)

_FIRST_BACKOFF_S = 0.5
_LONGEST_BACKOFF_S = 30.0
_COALESCE_S = 0.05
"""Seconds for which changes are collected into one pass."""
_REFUSED_PAUSE_S = 1.0
"""Least pause after a refusal. A change of the pool, which may be its correction, cuts the longer pause short."""
_STOP_S = 5.0
"""Seconds that a pass may take to end when its pool is gone or the operator stops."""

Observer = Callable[[str, float], None]
"""Called after each pass with its result and its seconds."""


class Manager:
    """Runs a task for each pool in the store. `wake` is the store's `on_change`."""

    def __init__(
        self,
        context: Context,
        *,
        decide_s: float,
        on_pass: Observer = lambda *_: None,
        shows: Callable[[str], bool] = lambda _: True,
        ends: Counter[str] | None = None,
    ) -> None:
        """Prepare; no pass is made yet.

        Args:
            decide_s: seconds between two passes of a pool to which nothing happens.
            shows: returns whether the store shows a namespace as it is. Where it doesn't, objects look as if they were
                missing, or are as they were: no pass is made.
            ends: counts pools' tasks that have ended though nobody asked for that; they are started again.
        """
        self._context, self._decide_s, self._on_pass, self._shows = context, decide_s, on_pass, shows
        self._ends: Counter[str] = Counter() if ends is None else ends
        self._runners: dict[PoolKey, _Runner] = {}
        self._changed = asyncio.Event()

    @property
    def pools(self) -> dict[PoolKey, Reconciler]:
        """The reconcilers of all pools."""
        return {key: runner.reconciler for key, runner in list(self._runners.items())}

    @property
    def unreadable(self) -> Mapping[str, int]:
        """Objects that were seen and can't be read, or not as a whole, by kind."""
        return self._context.store.unreadable

    @property
    def slowest_s(self) -> float:
        """Seconds that the longest current pass has run; 0 if none runs."""
        return max((runner.busy_s for runner in list(self._runners.values())), default=0.0)

    def wake(self, key: PoolKey) -> None:
        """Make a pass over a pool soon."""
        runner = self._runners.get(key)
        if runner is not None:
            runner.wake()
        else:
            self._changed.set()

    def wake_all(self) -> None:
        """Make a pass over all pools soon, since leadership or what is seen has changed."""
        for runner in self._runners.values():
            runner.wake()

    async def run(self, stop: asyncio.Event) -> None:
        """Run until `stop` is set."""
        try:
            while not stop.is_set():
                self._follow_store()
                await self._pause(stop)
        finally:
            await self._end(list(self._runners))

    def _follow_store(self) -> None:
        there = set(self._context.store.pools())
        for key in there - set(self._runners):
            runner = _Runner(Reconciler(key, self._context), self._decide_s, self._on_pass, self._shows)
            self._runners[key] = runner
            runner.start()
        for key, runner in self._runners.items():
            if runner.has_ended:
                self._ends["pool"] += 1
                logger.error("the task of a pool has ended, and is started again", extra={"pool": "/".join(key)})
                runner.start()

    async def _pause(self, stop: asyncio.Event) -> None:
        there = set(self._context.store.pools())
        gone = {key for key, runner in self._runners.items() if key not in there and runner.has_done}
        if gone:
            await self._end(list(gone))
        try:
            async with asyncio.timeout(self._decide_s):
                await self._changed.wait()
        except TimeoutError:
            return
        self._changed.clear()

    async def _end(self, keys: list[PoolKey]) -> None:
        runners = [self._runners.pop(key) for key in keys]
        await asyncio.gather(*(runner.stop() for runner in runners))


class _Runner:
    """The task of one pool: passes one after another, never two at once."""

    def __init__(
        self, reconciler: Reconciler, decide_s: float, on_pass: Observer, shows: Callable[[str], bool]
    ) -> None:
        self.reconciler = reconciler
        self._decide_s, self._on_pass, self._shows = decide_s, on_pass, shows
        self._wake = asyncio.Event()
        self._stop = asyncio.Event()
        self._backoff_s = 0.0
        self._ends_at_change = False
        self._began: float | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def busy_s(self) -> float:
        """Seconds that the current pass has run; 0 when idle."""
        return 0.0 if self._began is None else time.monotonic() - self._began

    @property
    def has_done(self) -> bool:
        """Whether nothing is left to do for a pool that is gone."""
        return not self.reconciler.is_unpublishing

    @property
    def has_ended(self) -> bool:
        """Whether the task is over though nobody has stopped it."""
        return self._task is not None and self._task.done() and not self._stop.is_set()

    def start(self) -> None:
        """Start the task, at first and after an end of it."""
        self._began = None
        self._wake.set()
        self._task = asyncio.create_task(self._run(), name=f"pool {self.reconciler.key}")

    def wake(self) -> None:
        """Make a pass soon."""
        self._wake.set()

    async def stop(self) -> None:
        """Stop the task. A pass that doesn't end within `_STOP_S` is cancelled."""
        self._stop.set()
        self._wake.set()
        if self._task is not None:
            _, late = await asyncio.wait({self._task}, timeout=_STOP_S)
            for task in late:
                task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        # Spread the passes of all pools over time.
        await asyncio.sleep(random.random() * self._decide_s / 10)
        unfinished = False
        while not self._stop.is_set():
            is_dirty = self._wake.is_set() or unfinished
            self._wake.clear()
            if self._shows(self.reconciler.key.namespace):
                unfinished = not await self._pass(is_dirty)
            else:
                unfinished, self._backoff_s = True, 0.0
            await self._pause()

    async def _pass(self, is_dirty: bool) -> bool:
        """Make one pass; returns whether it came to its end."""
        self._began = time.monotonic()
        self._ends_at_change = False
        result = "error"
        try:
            result, self._backoff_s = await self.reconciler.pass_once(is_dirty=is_dirty), 0.0
            return True  # parts of it that have failed are tried again by themselves
        except NotLeading:
            result, self._backoff_s = "not_leading", 0.0
        except Conflict as error:
            result = "conflict"
            if self._backoff_s:  # again: no event has shown what the object is now, so its watch may have gone silent
                self._suspect()
            self._fail(error, soon=True)
        except Gone as error:
            result = "gone"
            self._suspect()
            self._fail(error)
        except (Rejected, Blocked) as error:
            result = "refused"
            self._fail(error)
            self._ends_at_change = True
        except ApiFailure as error:
            self._fail(error, at_least=error.retry_after_s)
        except Exception:
            logger.exception("a pass has failed", extra={"pool": "/".join(self.reconciler.key)})
            self._fail(None)
        finally:
            took, self._began = time.monotonic() - self._began, None
            self._on_pass(result, took)
        return False

    def _suspect(self) -> None:
        """Have the pool and its Deployment listed again."""
        for kind in (POOL, DEPLOYMENT):
            self.reconciler.context.suspect(self.reconciler.key.namespace, kind)

    def _fail(self, error: OperatorError | None, *, soon: bool = False, at_least: float | None = None) -> None:
        longest = self._decide_s if soon else _LONGEST_BACKOFF_S
        self._backoff_s = min(longest, max(_FIRST_BACKOFF_S, 2 * self._backoff_s))
        if at_least is not None:
            self._backoff_s = max(self._backoff_s, min(at_least, _LONGEST_BACKOFF_S))
        if error is not None:
            logger.log(
                logging.INFO if soon else logging.WARNING,
                "the pass is retried: %s",
                error,
                extra={"pool": "/".join(self.reconciler.key), "seconds": self._backoff_s},
            )

    async def _pause(self) -> None:
        pause = self._backoff_s * (0.8 + 0.4 * random.random())
        if self._backoff_s and not self._ends_at_change:
            # Changes don't cut this pause short: a busy API server has too many of them.
            await self._sleep(pause)
            return
        await self._sleep(_REFUSED_PAUSE_S if self._backoff_s else _COALESCE_S)
        try:
            async with asyncio.timeout(max(pause, self._decide_s - _COALESCE_S)):
                await self._wake.wait()
        except TimeoutError:
            return

    async def _sleep(self, seconds: float) -> None:
        """Sleep, or until `stop`."""
        try:
            async with asyncio.timeout(seconds):
                await self._stop.wait()
        except TimeoutError:
            return
