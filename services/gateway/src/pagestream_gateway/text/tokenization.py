"""Bounds on the work for requests before they are accepted: threads for what would block the event loop, and bytes.

Requests that arrive at the same time are rendered and tokenized together.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from types import TracebackType
from typing import Self, TypeVar

from pagestream.v1.records_pb2 import RequestSpec
from pagestream_streams.tasks import ByteBudget

from pagestream_gateway.errors import InvalidRequest, Overloaded
from pagestream_gateway.settings import LimitSettings
from pagestream_gateway.text.encoder import PIECE_CHARS, Encoded, EncodingCache, EncodingJob, TextEncoder

logger = logging.getLogger(__name__)
T = TypeVar("T")
SMALL_BYTES = 64 * 1024
"""Bytes of a request that is parsed in less time than a thread takes to answer."""
PATIENCE_S = 2.0
"""Seconds in which a body is received whole, unless its sender or the network is slow."""
TICKS = 20
"""Parts that a patience is measured in. A process that is late reads late, so each counts once however long it took."""


class TokenizePool:
    """Runs CPU work of requests in threads, with a bounded queue."""

    def __init__(self, *, workers: int, max_pending: int, limit_s: float) -> None:
        """Start no thread yet.

        Args:
            workers: number of threads.
            max_pending: calls that run or wait; one more raises Overloaded.
            limit_s: seconds that one call may take, its wait included.
        """
        self._executor = ThreadPoolExecutor(workers, thread_name_prefix="tokenize")
        self._max_pending = max_pending
        self._num_pending = 0
        self._limit_s = limit_s

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def run(self, work: Callable[[], T]) -> T:
        """Return the result of `work`. Raises Overloaded where too much waits or it takes too long."""
        if self._num_pending >= self._max_pending:
            raise Overloaded(
                f"too many requests wait for the tokenizer, at most {self._max_pending}", retry_after_s=1.0
            )
        self._num_pending += 1
        future = self._executor.submit(_guarded, work)
        # Counted until the thread is done with it, also after its caller was cancelled: the bound is on the work.
        loop = asyncio.get_running_loop()
        future.add_done_callback(lambda _: loop.call_soon_threadsafe(self._release) if not loop.is_closed() else None)
        try:
            async with asyncio.timeout(self._limit_s):
                return await asyncio.wrap_future(future)
        except TimeoutError as error:
            raise Overloaded(f"tokenizing took longer than {self._limit_s:g} s", retry_after_s=5.0) from error

    def start(self, work: Callable[[], object]) -> None:
        """Run `work` in a thread, without a bound and without a result: its caller has both."""
        self._executor.submit(work)

    def _release(self) -> None:
        self._num_pending -= 1


def error_of_work(error: BaseException) -> Exception:
    """Return what a thread's work has raised. A panic in the tokenizer's Rust is a BaseException alone."""
    if isinstance(error, Exception):
        return error
    failure = InvalidRequest(None, f"the model's tokenizer fails on it: {str(error)[:200]}")
    failure.__cause__ = error
    return failure


def _guarded(work: Callable[[], T]) -> T:
    try:
        return work()
    except BaseException as error:  # noqa: BLE001  it is raised where the work is waited for
        raise error_of_work(error) from error.__cause__


class PatientClock:
    """Seconds in which this process has had time to read: it stands while nothing waits, and slows while it is late."""

    def __init__(self) -> None:
        self.now_s = 0.0

    async def tick(self, period_s: float) -> None:
        """Wait for the period, and count it once."""
        await asyncio.sleep(period_s)
        self.now_s += period_s


class PendingRequest:
    """One request's place among the pending ones."""

    def __init__(self, patience_s: float, clock: PatientClock) -> None:
        self._patience_s = patience_s
        self._clock = clock
        self._scope: asyncio.Timeout | None = None
        self._began_at = 0.0

    @contextlib.asynccontextmanager
    async def receiving(self) -> AsyncIterator[None]:
        """Receive the body inside the block. Raises Overloaded where it takes long and others wait for its room."""
        self._began_at = self._clock.now_s
        try:
            async with asyncio.timeout(None) as self._scope:
                yield
        except TimeoutError as error:
            raise Overloaded("the body arrives slowly, and other large requests wait for its room", 5.0) from error
        finally:
            self._scope = None

    def give_way(self) -> bool:
        """End the receiving where others have waited for it for long; return whether they have."""
        # Half a tick less: the clock's sums are rounded.
        least_s = self._patience_s * (1 - 0.5 / TICKS)
        if self._scope is None or self._clock.now_s - self._began_at < least_s:
            return False
        self._scope.reschedule(0.0)
        self._scope = None
        return True


class PendingRequests:
    """Bounds the bytes of large requests that are read, parsed and tokenized at once; further ones wait in order.

    Where one has waited for the patience, the request whose body has been arriving for longest gives way.
    """

    def __init__(self, max_bytes: int, *, limit_s: float, patience_s: float | None = None) -> None:
        """`limit_s`: seconds that a request may wait; `patience_s`: PATIENCE_S where it is None."""
        self._patience_s = PATIENCE_S if patience_s is None else patience_s
        self.parsing = asyncio.Lock()
        """Held while a large body is parsed. A parser holds Python's lock for tens of milliseconds at a time, and two
        would keep the event loop waiting twice as long.
        """
        self._budget = ByteBudget(max_bytes)
        self._limit_s = limit_s
        self._admitted: dict[PendingRequest, None] = {}  # in order
        self._clock = PatientClock()
        self._due_at: dict[object, float] = {}  # of those that wait, on the clock, in order
        self._impatience: asyncio.Task[None] | None = None  # while one waits

    @contextlib.asynccontextmanager
    async def hold(self, num_bytes: int) -> AsyncIterator[PendingRequest]:
        """Count a request of so many bytes as pending inside the block; small ones do not count. Raises Overloaded."""
        num_bytes = 0 if num_bytes <= SMALL_BYTES else min(num_bytes, self._budget.limit_bytes)
        if num_bytes and not self._budget.try_take(num_bytes):
            await self._wait(num_bytes)
        request = PendingRequest(self._patience_s, self._clock)
        if num_bytes:
            self._admitted[request] = None
        try:
            yield request
        finally:
            self._admitted.pop(request, None)
            self._budget.give(num_bytes)

    async def _wait(self, num_bytes: int) -> None:
        waiter = object()
        self._due_at[waiter] = self._clock.now_s + self._patience_s
        if self._impatience is None:
            self._impatience = asyncio.create_task(self._make_room(), name="impatience")
        try:
            async with asyncio.timeout(self._limit_s):
                await self._budget.take(num_bytes)
        except TimeoutError as error:
            raise Overloaded(
                f"large requests of {self._budget.limit_bytes} bytes together are being read", retry_after_s=5.0
            ) from error
        finally:
            del self._due_at[waiter]
            if not self._due_at:
                self._impatience.cancel()
                self._impatience = None

    async def _make_room(self) -> None:
        while True:
            await self._clock.tick(self._patience_s / TICKS)
            for waiter, due_at in list(self._due_at.items()):
                if due_at > self._clock.now_s:
                    break
                del self._due_at[waiter]
                self._due_at[waiter] = self._clock.now_s + self._patience_s
                any(request.give_way() for request in list(self._admitted))  # the first that can


Preparation = Generator[list[EncodingJob], list[Encoded], RequestSpec]
"""Renders a request, yields its texts once, gets what came of them, and returns the request's record."""

_MOST_REQUESTS = 32  # of a batch: the first one waits for the rendering of the last one
_MOST_CHARS = 4 * PIECE_CHARS  # of a batch


class _Work:
    """One draft on its way through a thread."""

    def __init__(self, preparation: Preparation, encoder: TextEncoder, *, cuts_long_texts: bool) -> None:
        self.encoder = encoder
        self.cuts_long_texts = cuts_long_texts
        self.jobs: list[EncodingJob] = []
        self.done: asyncio.Future[RequestSpec] = asyncio.get_running_loop().create_future()
        self._preparation = preparation
        self._outcome: RequestSpec | Exception | None = None

    def render(self) -> bool:
        """Render the texts; return whether that succeeded."""
        try:
            self.jobs = next(self._preparation)
        except BaseException as error:  # noqa: BLE001  it is raised where the draft is waited for
            self._outcome = error_of_work(error)
        return self._outcome is None

    def encode(self, cache: EncodingCache) -> None:
        """Encode the texts alone, one after the other."""
        try:
            found = [self.encoder.encode_batch([job], cache)[0] for job in self.jobs]
        except BaseException as error:  # noqa: BLE001  it is raised where the draft is waited for
            self._outcome = error_of_work(error)
        else:
            self.finish(iter(found))

    def finish(self, found: Iterator[Encoded]) -> None:
        """Take what came of the texts."""
        try:
            self._preparation.send([next(found) for _ in self.jobs])
        except StopIteration as done:
            self._outcome = done.value
        except BaseException as error:  # noqa: BLE001  it is raised where the draft is waited for
            self._outcome = error_of_work(error)

    def deliver(self) -> None:
        """Give the outcome to who waits for it; called by the event loop."""
        if self.done.done():
            return
        if isinstance(self._outcome, RequestSpec):
            self.done.set_result(self._outcome)
        else:
            self.done.set_exception(self._outcome or RuntimeError("the draft was not prepared"))


class EncoderPool:
    """One for a gateway: threads that take what waits in batches, and a cache of parts of prompts."""

    def __init__(self, pool: TokenizePool, limits: LimitSettings) -> None:
        """`pool`: the threads, which also parse; its bound and its limit count for each draft."""
        self._pool = pool
        self._limits = limits
        self._waiting: deque[_Work] = deque()
        self._lock = Lock()
        self._num_draining = 0
        self._num_pending = 0
        self.cache = EncodingCache(limits.encoding_cache_bytes)

    async def prepare(self, preparation: Preparation, encoder: TextEncoder, *, cuts_long_texts: bool) -> RequestSpec:
        """Return what a preparation returns. Raises what it raises, and Overloaded.

        `cuts_long_texts`: whether it encodes while it renders; then none that is quicker waits for it.
        """
        limits = self._limits
        if self._num_pending >= limits.tokenize_queue:
            raise Overloaded(
                f"too many requests wait for the tokenizer, at most {limits.tokenize_queue}", retry_after_s=1.0
            )
        work = _Work(preparation, encoder, cuts_long_texts=cuts_long_texts)
        self._num_pending += 1
        with self._lock:
            self._waiting.append(work)
            is_enough = self._num_draining >= limits.tokenize_workers
            self._num_draining += not is_enough
        if not is_enough:
            loop = asyncio.get_running_loop()
            self._pool.start(lambda: self._drain(loop))
        try:
            async with asyncio.timeout(limits.tokenize_limit_s):
                return await work.done
        except TimeoutError as error:
            raise Overloaded(f"tokenizing took longer than {limits.tokenize_limit_s:g} s", retry_after_s=5.0) from error

    def _drain(self, loop: asyncio.AbstractEventLoop) -> None:
        """Prepare what waits, batch after batch, until nothing does; runs in a thread."""
        while batch := self._next_batch():
            try:
                self._prepare(batch, loop)
            except BaseException:
                logger.exception("a batch of prompts failed")
            _call(loop, _deliver, batch)  # those that failed with it
            _call(loop, self._release, len(batch))

    def _next_batch(self) -> list[_Work]:
        with self._lock:
            batch = [self._waiting.popleft() for _ in range(min(_MOST_REQUESTS, len(self._waiting)))]
            self._num_draining -= not batch
        return batch

    def _prepare(self, batch: list[_Work], loop: asyncio.AbstractEventLoop) -> None:
        """Encode short texts together; then, one after the other, what is long, for which no other one waits."""
        cutting = [work for work in batch if work.cuts_long_texts]
        rendered = [work for work in batch if work not in cutting and work.render()]
        long = [work for work in rendered if sum(len(job.text) for job in work.jobs) > PIECE_CHARS]
        for group in _groups([work for work in rendered if work not in long]):
            self._encode_together(group)
        _call(loop, _deliver, [work for work in batch if work not in long and work not in cutting])
        for work in (*long, *cutting):
            if work in long or work.render():
                work.encode(self.cache)
            _call(loop, _deliver, [work])

    def _encode_together(self, group: list[_Work]) -> None:
        """Encode the texts of works with one encoder; alone where a defect of one text would fail all of them."""
        try:
            found = iter(group[0].encoder.encode_batch([job for work in group for job in work.jobs], self.cache))
        except BaseException:  # noqa: BLE001  it is raised again for the text that causes it
            for work in group:
                work.encode(self.cache)
            return
        for work in group:
            work.finish(found)

    def _release(self, count: int) -> None:
        self._num_pending -= count


def _groups(works: list[_Work]) -> Iterator[list[_Work]]:
    """Yield the works with the same encoder, in groups of a bounded number of characters."""
    by_encoder: defaultdict[int, list[_Work]] = defaultdict(list)
    for work in works:
        by_encoder[id(work.encoder)].append(work)
    for same in by_encoder.values():
        group, num_chars = list[_Work](), 0
        for work in same:
            size = sum(len(job.text) for job in work.jobs)
            if group and num_chars + size > _MOST_CHARS:
                yield group
                group, num_chars = [], 0
            group.append(work)
            num_chars += size
        yield group


def _deliver(works: list[_Work]) -> None:
    for work in works:
        work.deliver()


def _call(loop: asyncio.AbstractEventLoop, function: Callable[..., None], argument: object) -> None:
    """Call from a thread in the event loop, unless that is closed."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(function, argument)
