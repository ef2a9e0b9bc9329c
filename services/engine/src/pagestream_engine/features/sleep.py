"""Sleep: an engine without requests gives up its memory but for the weights, and takes it again."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

from pagestream_engine.errors import InvalidRequest, SleepFailed
from pagestream_engine.kv_cache.manager import CacheManager
from pagestream_engine.steps import StepPipeline
from pagestream_engine.wire.executor import Prepared, SleepChange, SleepChanged

LIMIT_S = 120.0
"""For the weights to be copied: 140 GB at 2 GB/s take 70 s."""
_POLL_S = 0.1
_LEVELS = (1,)


class Sleep:
    """Puts an engine's executor to sleep, and wakes it.

    Args:
        note: takes what else the executor has prepared meanwhile.
        has_requests: whether any are unfinished.
    """

    def __init__(
        self,
        steps: StepPipeline,
        cache: CacheManager,
        note: Callable[[Prepared], None],
        has_requests: Callable[[], bool],
        limit_s: float = LIMIT_S,
    ) -> None:
        self._steps = steps
        self._cache = cache
        self._note = note
        self._has_requests = has_requests
        self._limit_s = limit_s
        self.is_asleep = False
        """Whether weights alone are in memory; requests are refused."""

    def begin(self, level: int = 1) -> None:
        """Release the KV cache, with the prefixes in it, and what steps work with. On a GPU the weights go to host
        memory. Nothing happens where it sleeps.

        Args:
            level: vLLM's: 1. Level 2, no weights either, is the end of the engine.

        Raises:
            InvalidRequest: another level, or a request is unfinished.
            SleepFailed: it was not done; the engine can't go on, unless by `restart_executor`.
            ExecutorDied: its process has ended.
        """
        if level not in _LEVELS:
            raise InvalidRequest(f"level: given {level!r}, expected 1; close the engine to release its weights")
        if self.is_asleep:
            return
        if self._has_requests():
            raise InvalidRequest("sleep: given an engine with unfinished requests; let them end, or abort them")
        self._steps.drain()
        self._steps.roll_back()  # the next plan finds no rows
        forget_prefixes(self._cache)
        self.is_asleep = True
        self._change(SleepChange(is_asleep=True))

    def end(self) -> None:
        """Wake up: requests can run again, and the cache is empty. Nothing happens where it is awake.

        Raises:
            SleepFailed: there is no memory for it any more; the engine stays asleep.
            ExecutorDied: its process has ended.
        """
        if self.is_asleep:
            self._change(SleepChange(is_asleep=False))
            self.is_asleep = False

    def _change(self, wanted: SleepChange) -> None:
        executor, until = self._steps.executor, monotonic() + self._limit_s
        executor.prepare(wanted)
        while monotonic() < until:
            change: SleepChanged | None = None
            for done in executor.prepared(_POLL_S):
                if not isinstance(done, SleepChanged):
                    self._note(done)
                elif done.is_asleep == wanted.is_asleep:
                    change = done
            if change is not None:
                if change.error is not None:
                    raise SleepFailed(f"the executor can't {_verb(wanted)}: {change.error}")
                return
            executor.check_alive()
        raise SleepFailed(f"the executor does not {_verb(wanted)} in {self._limit_s:g} s")


def forget_prefixes(cache: CacheManager) -> None:
    """Forget what is cached, in host memory too: the memory behind it is gone. No sequence has blocks."""
    cache.pool.reset_prefix_cache()
    if cache.tier is not None:
        cache.tier.reset()


def _verb(change: SleepChange) -> str:
    return "sleep" if change.is_asleep else "wake up"
