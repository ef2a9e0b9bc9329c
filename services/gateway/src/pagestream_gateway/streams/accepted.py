"""Accepted requests: look them up, follow their logs, cancel them, and end their answers when the process stops.

A log is read in runs, consecutive entries of one choice, the unit in which all APIs write an answer. A position in it
is `<request id>/<next index>/<digest>` over HTTP.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple, Self

from pagestream.v1.inference_pb2 import REQUEST_STATE_FINISHED, FinishReason, TokenLogprobs
from pagestream.v1.records_pb2 import ChoiceFinish, LogEnd, LogEntry, RequestSpec
from pagestream_streams import Broker, GatewaySession, RequestPage, RequestView, discard_request, list_requests
from pagestream_streams.errors import DigestMismatch, OffsetOutOfRange, RequestNotFound, StreamsError
from pagestream_streams.gateway.readers import Sink

from pagestream_gateway.calls import Metrics, RedisTimeout
from pagestream_gateway.errors import GatewayStopping, InvalidRequest


@dataclass(slots=True)
class Run:
    """One or more consecutive entries of one choice, or the log's end alone; prompt parts stand apart from tokens."""

    choice: int
    next_index: int
    """Index after the last entry: with `digest`, what a reader sends back to read on."""
    digest: str
    """Rolling digest after the last entry."""
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Of tokens of the prompt, which is that of the choices from `choice` on. Such a run has no tokens."""
    prompt_end: int = 0
    """How many of the prompt's log probabilities there are up to and including these."""
    embedding: bytes = b""
    """The vector of the choice's prompt: float32 numbers in little-endian order. Such a run has no tokens."""
    finish: ChoiceFinish | None = None
    end: LogEnd | None = None


def split_runs(first_index: int, entries: Sequence[LogEntry]) -> list[Run]:
    """Return the runs of `entries`, whose first has index `first_index`, in order."""
    if len(entries) == 1 and (entry := entries[0]).HasField("token_id") and not entry.HasField("logprobs"):
        return [Run(entry.choice, first_index + 1, entry.digest, entry.text, [entry.token_id])]  # nearly every one
    runs: list[Run] = []
    run: Run | None = None
    for index, entry in enumerate(entries, start=first_index + 1):
        kind = entry.WhichOneof("body")
        if kind == "end":
            runs.append(Run(0, index, entry.digest, end=entry.end))
            run = None
            continue
        is_part = kind == "prompt_part"  # which stands apart from tokens
        if run is None or run.choice != entry.choice or run.finish is not None or is_part != bool(run.prompt_end):
            run = Run(entry.choice, index, entry.digest)
            runs.append(run)
        else:
            run.next_index = index
            run.digest = entry.digest
        run.text += entry.text
        if kind == "token_id":
            run.token_ids.append(entry.token_id)
            if entry.HasField("logprobs"):
                run.logprobs.append(entry.logprobs)
        elif kind == "finish":
            run.finish = entry.finish
        elif kind == "prompt_part":
            run.prompt_logprobs.extend(entry.prompt_part.logprobs)
            run.prompt_end = entry.prompt_part.end
            run.embedding = entry.prompt_part.embedding
    return runs


_MAX_INDEX = 2**63


@dataclass(frozen=True, slots=True)
class Position:
    """Where a reader goes on."""

    next_index: int = 0
    """Index of the next log entry."""
    digest: str = ""
    """Rolling digest of the entries before it; an empty one is not compared."""
    source: str = field(default="", compare=False)
    """The part of a call that gave it, for error messages."""

    @property
    def is_verified(self) -> bool:
        """Whether a reader who starts here is refused where the log before differs from what it has read."""
        return bool(self.digest) or self.next_index == 0

    def event_id(self, request_id: str) -> str:
        """Return the `stream_position`, and the `id`, of the event whose last entry stands before this position."""
        return f"{request_id}/{self.next_index}/{self.digest}"

    @classmethod
    def parse(cls, event_id: str, request_id: str) -> Self:
        """Return the position of a Last-Event-ID. Raises InvalidRequest."""
        parts = event_id.split("/")
        if len(parts) != 3 or parts[0] != request_id:
            raise InvalidRequest(
                "Last-Event-ID", f"expected '{request_id}/<next index>/<digest>', got {event_id[:200]!r}"
            )
        return cls(_index(parts[1], "Last-Event-ID"), parts[2], "Last-Event-ID")

    @classmethod
    def parse_index(cls, text: str) -> Self:
        """Return the position of the query parameter `from`. Raises InvalidRequest."""
        return cls(_index(text, "from"), source="from")


START = Position()


def position_after(run: Run) -> Position:
    """Return the position after a run's last entry."""
    return Position(run.next_index, run.digest)


def _index(text: str, field: str) -> int:
    if not (text.isascii() and text.isdigit()) or len(text) > 20 or int(text) >= _MAX_INDEX:
        raise InvalidRequest(field, f"expected the index of a log entry (0 or more), got {text[:200]!r}")
    return int(text)


logger = logging.getLogger(__name__)

_PLACE_LIMIT_S = 0.25  # an answer does not wait for longer to say where its request stands


class QueuePlace(NamedTuple):
    """Where a request stands that no engine has claimed yet."""

    position: int
    """Requests of its model that go before it."""
    expected_wait_ms: int | None
    """Until an engine claims it, by the measured rate; None for unknown."""


@dataclass(frozen=True)
class AcceptedRequests:
    """Requests by their ids. The id of another tenant's request raises RequestNotFound, as an unknown one does."""

    broker: Broker
    session: GatewaySession
    metrics: Metrics
    limit: RedisTimeout

    def follow(
        self,
        spec: RequestSpec,
        *,
        from_index: int = 0,
        digest: str = "",
        sink: Sink | None = None,
        on_engine: Callable[[str], None] | None = None,
    ) -> AsyncGenerator[list[LogEntry], None]:
        """Yield batches of log entries from `from_index` to the end of the log.

        Close the generator (`aclosing`): that removes the reader from the request. A request that Redis loses
        meanwhile is accepted again and goes on under the same id. `sink` takes live entries, and `on_engine` gets the
        fingerprint of their engine: see GatewaySession.read.
        """
        return self.session.read(
            spec.request_id,
            tenant=spec.tenant,
            from_index=from_index,
            digest=digest,
            spec=spec,
            sink=sink,
            on_engine=on_engine,
        )

    async def resume(self, request_id: str, tenant: str, *, from_index: int, digest: str) -> tuple[RequestView, bool]:
        """Look up a request that a reader wants to read on from `from_index`.

        Returns the request, and whether its log has ended there. Raises RequestNotFound, also for one that was deleted,
        OffsetOutOfRange, DigestMismatch, Unavailable. The digest of a place that the log has not reached yet is checked
        by `follow`.
        """
        view = _kept(await self.limit.wait(self.broker.view(request_id, tenant, with_position=False)))
        if from_index > view.next_index and view.state == REQUEST_STATE_FINISHED:
            raise OffsetOutOfRange(request_id, from_index, view.next_index)
        if from_index == view.next_index and digest and digest != view.digest:
            raise DigestMismatch(request_id, from_index)
        if 0 < from_index < view.next_index and digest:
            await self._check_digest(view.spec, from_index, digest)
        return view, from_index == view.next_index and view.state == REQUEST_STATE_FINISHED

    async def view(self, request_id: str, tenant: str) -> RequestView:
        """Return a request's state. Raises RequestNotFound, also for one that was deleted; Unavailable."""
        return _kept(await self.limit.wait(self.broker.view(request_id, tenant)))

    async def place(self, spec: RequestSpec) -> QueuePlace | None:
        """Return where a queued request stands; None where an engine has it, or Redis does not tell at once."""
        try:
            async with asyncio.timeout(_PLACE_LIMIT_S):
                found = await self.broker.place(spec.request_id, spec.tenant)
        except (TimeoutError, StreamsError):
            return None  # an answer is worth more than its place
        return None if found is None else QueuePlace(found.requests, found.wait_ms)

    async def fingerprint(self, spec: RequestSpec) -> str:
        """Return the fingerprint of the engine that runs or ran a request; "" where Redis does not tell it now."""
        try:
            return await self.limit.wait(self.broker.fingerprint(spec.request_id, spec.tenant))
        except StreamsError:
            return ""  # an answer is worth more than this field

    async def list(self, tenant: str, *, limit: int, after: str) -> RequestPage:
        """Return a tenant's requests, newest first. Raises RequestNotFound for an `after` that is not listed."""
        return await self.limit.wait(list_requests(self.broker, tenant, limit=limit, after=after))

    async def cancel(self, request_id: str, tenant: str) -> FinishReason:
        """End a request in whatever state it is; return how it ended. Raises RequestNotFound, Unavailable."""
        reason = await self.limit.wait(self.broker.cancel(request_id, tenant))
        self.metrics.cancelled((await self.broker.directory.locate(request_id)).model)
        logger.info("cancelled", extra={"request_id": request_id, "tenant": tenant})
        return reason

    async def discard(self, request_id: str, tenant: str) -> None:
        """End a request, and let its record and log expire within a minute. Raises RequestNotFound, Unavailable."""
        await self.limit.wait(discard_request(self.broker, request_id, tenant))
        logger.info("discarded", extra={"request_id": request_id, "tenant": tenant})

    async def _check_digest(self, spec: RequestSpec, from_index: int, digest: str) -> None:
        async with aclosing(self.follow(spec, from_index=from_index, digest=digest)) as batches:
            await self.limit.wait(anext(batches))


def _kept(view: RequestView) -> RequestView:
    """Return a view. Raises RequestNotFound for a request that was deleted, whose record expires within a minute."""
    if view.is_discarded:
        raise RequestNotFound(view.request_id)
    return view


class OpenStreams:
    """The tasks that write answers.

    `drain` cancels those that don't end in time; `entered` turns that cancellation, and no other, into
    GatewayStopping, which each API reports to its client.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._tasks: set[asyncio.Task[object]] = set()
        self._ended: set[asyncio.Task[object]] = set()
        self._empty = asyncio.Event()
        self._empty.set()
        self.is_stopping = False

    def __len__(self) -> int:
        return len(self._tasks)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Register the running task while it writes an answer.

        Raises GatewayStopping where the process is stopping already, and when `drain` ends the answer.
        """
        task = asyncio.current_task()
        if task is None or self.is_stopping:
            raise GatewayStopping
        self._tasks.add(task)
        self._empty.clear()
        self._metrics.stream_opened()
        try:
            yield
        except asyncio.CancelledError:
            if task not in self._ended:
                raise
            task.uncancel()
            raise GatewayStopping from None
        finally:
            self._tasks.discard(task)
            self._ended.discard(task)
            self._metrics.stream_closed()
            if not self._tasks:
                self._empty.set()

    async def drain(self, limit_s: float) -> None:
        """Refuse new answers, wait `limit_s` seconds for the open ones, then end these."""
        self.is_stopping = True
        try:
            async with asyncio.timeout(limit_s):
                await self._empty.wait()
        except TimeoutError:
            for task in tuple(self._tasks):
                self._ended.add(task)
                task.cancel()
