"""Render and tokenize the drafts of a gateway, those that come at the same time together."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from threading import Lock

from pagestream_gateway.core.drafts import Draft, TextPrompt
from pagestream_gateway.core.models import LoadedModel
from pagestream_gateway.core.preparation import Preparation, PreparedRequest, preparing
from pagestream_gateway.core.text.encoder import PIECE_CHARS, Encoded, EncodingJob, TextEncoder
from pagestream_gateway.core.text.encoding_cache import EncodingCache
from pagestream_gateway.core.tokenization import TokenizePool, error_of_work
from pagestream_gateway.errors import Overloaded
from pagestream_gateway.settings import LimitSettings

logger = logging.getLogger(__name__)

_MOST_REQUESTS = 32  # of a batch: the first one waits for the rendering of the last one
_MOST_CHARS = 4 * PIECE_CHARS  # of a batch


class _Work:
    """One draft on its way through a thread."""

    def __init__(self, preparation: Preparation, encoder: TextEncoder, *, cuts_long_texts: bool) -> None:
        self.encoder = encoder
        self.cuts_long_texts = cuts_long_texts
        self.jobs: list[EncodingJob] = []
        self.done: asyncio.Future[PreparedRequest] = asyncio.get_running_loop().create_future()
        self._preparation = preparation
        self._outcome: PreparedRequest | Exception | None = None

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
        if isinstance(self._outcome, PreparedRequest):
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

    async def prepare(self, draft: Draft, model: LoadedModel, scope: bytes) -> PreparedRequest:
        """Return what a draft is turned into; see `preparing`. Raises InvalidRequest, Overloaded."""
        limits = self._limits
        if self._num_pending >= limits.tokenize_queue:
            raise Overloaded(
                f"too many requests wait for the tokenizer, at most {limits.tokenize_queue}", retry_after_s=1.0
            )
        work = _Work(preparing(draft, model, limits, scope), model.encoder, cuts_long_texts=_cuts_long_texts(draft))
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
        while batch := self._take():
            try:
                self._prepare(batch, loop)
            except BaseException:
                logger.exception("a batch of prompts failed")
            _call(loop, _deliver, batch)  # those that failed with it
            _call(loop, self._release, len(batch))

    def _take(self) -> list[_Work]:
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


def _cuts_long_texts(draft: Draft) -> bool:
    """Whether texts are encoded already while they are rendered, to be cut, and long ones."""
    asked = draft.pooling
    if asked is None or not (asked.num_query_tokens or asked.num_doc_tokens):
        return False
    return sum(len(prompt.text) for prompt in draft.prompts if isinstance(prompt, TextPrompt)) > PIECE_CHARS


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
