"""Threads that walk through grammars beside the steps.

llguidance bounds the work of one mask, which may still be most of a second; nothing bounds the sum over a step's rows.
So no step computes a mask: it waits for them under a deadline, and a row whose mask isn't there has no token in it.
"""

from __future__ import annotations

import atexit
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Sequence
from math import inf

_CLOSE_LIMIT_S = 5.0
"""Wait for each thread's end."""
CHEAP_S = 0.002
"""Of a mask: grammars up to it are served first, several jobs in a turn."""
_LONG_S = 0.05
"""Of a mask: grammars above it are served last, and never by the first thread."""
_MOST_AT_ONCE = 8
"""Cheap jobs of a grammar that a thread does in one turn."""


class MaskJob:
    """One piece of work on a row's walk.

    Args:
        grammar: jobs of equal ones run one after the other. Their matchers share a lexer, and its lock.
        expected_s: returns what it may take, asked when it is queued.
        work: run once on a thread; must not raise.
    """

    __slots__ = ("expected_s", "grammar", "is_cancelled", "is_done", "latch", "work")

    def __init__(self, grammar: Hashable, expected_s: Callable[[], float], work: Callable[[], None]) -> None:
        self.grammar = grammar
        self.expected_s = expected_s
        self.work = work
        self.is_done = False
        self.is_cancelled = False
        """Nobody wants it any more: it is not run if it has not begun."""
        self.latch: _Latch | None = None


class _Latch:
    """How many jobs somebody waits for."""

    __slots__ = ("count",)

    def __init__(self, count: int) -> None:
        self.count = count


class MaskThreads:
    """Runs jobs: those of cheap grammars first, those of one grammar in their order, grammars of a kind in turns.

    The first thread runs no grammar whose masks take long, so that these hold up others of their kind alone. Started
    with the first job. One thread submits and waits.

    Args:
        num_threads: at least 2.
    """

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._lock = threading.Lock()
        self._wake = threading.Condition(self._lock)
        self._done = threading.Condition(self._lock)
        self._queues: tuple[OrderedDict[Hashable, deque[MaskJob]], ...] = (OrderedDict(), OrderedDict(), OrderedDict())
        """Grammars that are cheap, others, and those that take long; each by whose turn it is."""
        self._busy: dict[Hashable, deque[MaskJob]] = {}
        """Grammars that a thread works on, and what waits for that."""
        self._threads: list[threading.Thread] = []
        self._is_closed = False

    def submit(self, jobs: Sequence[MaskJob]) -> None:
        """Queue jobs. After `close` they are never done."""
        if not jobs:
            return
        if not self._threads and not self._is_closed:
            self._threads = [
                threading.Thread(target=self._run, args=(2 if place == 0 else 3,), name="masks", daemon=True)
                for place in range(self._num_threads)
            ]
            atexit.register(self.close)  # a thread in the library must not outlive the interpreter
            for thread in self._threads:
                thread.start()
        with self._lock:
            for job in jobs:
                self._queue_of(job).append(job)
            self._wake.notify_all()

    def wait(self, jobs: Sequence[MaskJob], timeout_s: float, *, for_any: bool = False) -> None:
        """Wait until all of some jobs are done, or any of them, or the time is over."""
        with self._lock:
            pending = [job for job in jobs if not job.is_done]
            if not pending or (for_any and len(pending) < len(jobs)):
                return
            latch = _Latch(1 if for_any else len(pending))
            for job in pending:
                job.latch = latch
            limit_s = None if timeout_s == inf else timeout_s
            self._done.wait_for(lambda: latch.count <= 0 or self._is_closed, limit_s)
            for job in pending:
                job.latch = None

    def close(self) -> None:
        """End the threads, and drop what waits for them. A job that takes long ends its thread when it is done."""
        with self._lock:
            self._is_closed = True
            self._wake.notify_all()
            self._done.notify_all()
        atexit.unregister(self.close)
        for thread in self._threads:
            thread.join(_CLOSE_LIMIT_S)
        self._threads = []

    def _queue_of(self, job: MaskJob) -> deque[MaskJob]:
        key = job.grammar
        for queues in (self._busy, *self._queues):
            if key in queues:
                return queues[key]
        queue: deque[MaskJob] = deque()
        self._queues_for(job)[key] = queue
        return queue

    def _queues_for(self, job: MaskJob) -> OrderedDict[Hashable, deque[MaskJob]]:
        expected_s = job.expected_s()
        return self._queues[(expected_s > CHEAP_S) + (expected_s > _LONG_S)]

    def _run(self, num_kinds: int) -> None:
        """Run jobs of so many kinds."""
        mine = self._queues[:num_kinds]
        while True:
            with self._lock:
                self._wake.wait_for(lambda: self._is_closed or any(mine))
                if self._is_closed:
                    return
                key, jobs = self._take(next(queues for queues in mine if queues))
            for job in jobs:
                if not job.is_cancelled:
                    job.work()
            with self._lock:
                self._finish(key, jobs)

    def _take(self, queues: OrderedDict[Hashable, deque[MaskJob]]) -> tuple[Hashable, list[MaskJob]]:
        """Take the jobs of the grammar whose turn it is."""
        key, queue = queues.popitem(last=False)
        most = _MOST_AT_ONCE if queues is self._queues[0] else 1
        jobs = [queue.popleft() for _ in range(min(most, len(queue)))]
        self._busy[key] = queue
        return key, jobs

    def _finish(self, key: Hashable, jobs: Sequence[MaskJob]) -> None:
        waits = self._busy.pop(key)
        while waits and waits[0].is_cancelled:
            waits.popleft().is_done = True
        if waits:
            self._queues_for(waits[0])[key] = waits
            self._wake.notify_all()
        for job in jobs:
            job.is_done = True
            if job.latch is not None:
                job.latch.count -= 1
                if job.latch.count == 0:
                    self._done.notify_all()
