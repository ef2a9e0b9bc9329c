"""Metrics and span of one call, from its begin to its end; and the time that it may wait for Redis."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from pagestream.v1.records_pb2 import RequestSpec
from pagestream_streams.errors import Unavailable
from pagestream_streams.rates import Rate
from pagestream_telemetry import catalog
from pagestream_telemetry.instruments import Registry
from pagestream_telemetry.tracing import Span, SpanKind, TraceContext, Tracer, caller_context, set_trace

from pagestream_gateway.auth.audit import Audit
from pagestream_gateway.auth.identity import Identity


class Metrics:
    """Counters and gauges of one gateway process. All use is from the event loop."""

    def __init__(self, registry: Registry) -> None:
        self._streams_open = registry.number(catalog.STREAMS_OPEN).series()
        self._streams_open.set(0)
        self._tokens = registry.number(catalog.GATEWAY_TOKENS).series()
        self._requests = registry.number(catalog.GATEWAY_REQUESTS)
        self._errors = registry.number(catalog.ERRORS)
        self._cancellations = registry.number(catalog.CANCELLATIONS)
        self._first_token = registry.distribution(catalog.TIME_TO_FIRST_TOKEN)
        self._per_token = registry.distribution(catalog.TIME_PER_OUTPUT_TOKEN)
        self._duration = registry.distribution(catalog.REQUEST_DURATION)
        self._between_tokens = registry.distribution(catalog.INTER_TOKEN_LATENCY)

    @property
    def streams_open(self) -> int:
        """Number of answers that are being written."""
        return int(self._streams_open.value or 0)

    def stream_opened(self) -> None:
        """Count an answer that begins to be written."""
        self._streams_open.add(1)

    def stream_closed(self) -> None:
        """Count the end of an answer, complete or not."""
        self._streams_open.add(-1)

    def count_request(self, api: str, outcome: str) -> None:
        """Count a call that ended.

        `api` is "chat", "completions", "resume", "grpc" or another name of a gRPC method, or "http" for a connection
        that is refused before there is a call; `outcome` is "ok", "disconnected" or an error's code.
        """
        self._requests.series(api, outcome).add()

    def count_tokens(self, number: int) -> None:
        """Count tokens that were written to a client."""
        self._tokens.add(number)

    def error(self, model: str, error_type: str) -> None:
        """Count a call that ended with an error."""
        self._errors.series(model, error_type).add()

    def cancelled(self, model: str) -> None:
        """Count a request that its client cancelled or left."""
        self._cancellations.series(model).add()

    def first_token(self, model: str, operation: str, seconds: float) -> None:
        """Record the seconds from a call's begin to its first token."""
        self._first_token.series(model, operation).record(seconds)

    def between_tokens(self, model: str, seconds: float) -> None:
        """Record the seconds between two batches of tokens of one call."""
        self._between_tokens.series(model).record(seconds)

    def per_token(self, model: str, operation: str, seconds: float) -> None:
        """Record the mean seconds per token after the first, of an answer that was written whole."""
        self._per_token.series(model, operation).record(seconds)

    def duration(self, model: str, operation: str, error_type: str, seconds: float) -> None:
        """Record the seconds that a call took; `error_type` is "" on success."""
        self._duration.series(model, operation, error_type).record(seconds)


def now_s() -> int:
    """Return Unix seconds, for answers that show when they were made; no decision depends on it."""
    return int(time.time())


OK, DISCONNECTED = "ok", "disconnected"
CHAT, TEXT_COMPLETION, EMBEDDINGS, RESUME = "chat", "text_completion", "embeddings", "resume"
"""Operations: names of the GenAI semantic conventions, and one for a stream that is read on."""


class Call:
    """One call. `Calls.begin` makes it, the tasks that answer the call use it, `end` ends it once."""

    def __init__(
        self, metrics: Metrics, tracer: Tracer | None, audit: Audit, caller: TraceContext, *, api: str, operation: str
    ) -> None:
        self.api = api
        self._audit = audit
        self._identity: Identity | None = None
        self._spec: RequestSpec | None = None
        self._metrics = metrics
        self._tracer = tracer
        self._caller = caller
        self._begun_at = time.time()
        self._span: Span | None = None
        """None where no spans are exported, and before it begins."""
        self.context = caller
        """The trace context that the request carries."""
        self._operation = operation
        self._model = ""
        self._started = time.perf_counter()
        self._first_at = 0.0
        self._last_at = 0.0
        self._tokens = 0
        self._first_count = 0
        self._is_open = True
        self.rates: Sequence[Rate] = ()
        """How far the caller's limits are used; none where it has none, or nothing was admitted."""

    def set_rates(self, rates: Sequence[Rate]) -> None:
        """Set how far the caller's limits are used, this request included: answers show it."""
        self.rates = rates

    def begin_span(self, parent: TraceContext) -> None:
        """Start the call's span below `parent`, where spans are exported, with the call's begin as its start."""
        self.context = parent
        if self._tracer is not None:
            attributes = {"gen_ai.provider.name": "pagestream", "pagestream.api": self.api}
            self._span = self._tracer.start(
                self.api, parent, kind=SpanKind.SERVER, attributes=attributes, at_s=self._begun_at
            )
            self.context = self._span.context
        set_trace(self.context)

    def name_operation(self, operation: str) -> None:
        """Set the operation, where the body decides it."""
        self._operation = operation

    def identified(self, identity: Identity) -> None:
        """Note who calls: what becomes of the call is audited from here on."""
        self._identity = identity

    def accepted(self, spec: RequestSpec) -> None:
        """Note that the request is in the queue."""
        self._describe(spec)
        if self._identity is not None and self._audit.is_on:
            self._audit.accepted(self._identity, spec)
        if self._span is not None:
            self._span.event("accepted")

    def resumed(self, spec: RequestSpec) -> None:
        """Note that the call reads an earlier request on; the span joins its trace, unless the caller sent one."""
        self.begin_span(self._caller or TraceContext(spec.traceparent, spec.tracestate))
        self._describe(spec)

    def _describe(self, spec: RequestSpec) -> None:
        self._model, self._spec = spec.model, spec
        if self._span is None:
            return
        self._span.set(
            {
                "gen_ai.request.model": spec.model,
                "gen_ai.request.max_tokens": spec.sampling.max_tokens,
                "pagestream.request.id": spec.request_id,
                "pagestream.tenant": spec.tenant,
            }
        )

    def tokens(self, number: int) -> None:
        """Record that `number` tokens are about to be written."""
        if not number:
            return
        now = time.perf_counter()
        if self._tokens:
            self._metrics.between_tokens(self._model, now - self._last_at)
        else:
            self._begin_tokens(now, number)
        self._last_at = now
        self._tokens += number
        self._metrics.count_tokens(number)

    def end(self, outcome: str) -> None:
        """Record the outcome: "ok", "disconnected", or an error's code. Later calls do nothing."""
        if not self._is_open:
            return
        self._is_open = False
        self._metrics.count_request(self.api, outcome)
        if self._span is not None:
            self._end_span(self._span, outcome)
        if self._identity is not None and self._audit.is_on:
            self._end_audit(self._identity, outcome)
        if outcome == DISCONNECTED:
            self._metrics.cancelled(self._model)
        elif outcome != OK:
            self._metrics.error(self._model, outcome)
        if not self._operation or self._operation == RESUME:
            return
        error_type = "" if outcome == OK else outcome
        self._metrics.duration(self._model, self._operation, error_type, time.perf_counter() - self._started)
        more = self._tokens - self._first_count
        if outcome == OK and more > 0:
            self._metrics.per_token(self._model, self._operation, (self._last_at - self._first_at) / more)

    def _end_audit(self, identity: Identity, outcome: str) -> None:
        if self._spec is not None:
            self._audit.ended(identity, self.api, self._spec, outcome, self._tokens)
        elif outcome != OK:
            self._audit.refused(identity, self.api, outcome)

    def _begin_tokens(self, now: float, number: int) -> None:
        self._first_at, self._first_count = now, number
        if self._span is not None:
            self._span.event("first_token")
        if self._operation != RESUME:
            self._metrics.first_token(self._model, self._operation, now - self._started)

    def _end_span(self, span: Span, outcome: str) -> None:
        span.set({"gen_ai.operation.name": self._operation, "gen_ai.usage.output_tokens": self._tokens})
        if outcome != OK:
            span.fail(outcome)
        span.end()


class Calls:
    """Makes the calls of one process."""

    def __init__(self, metrics: Metrics, tracer: Tracer | None, audit: Audit) -> None:
        self._metrics = metrics
        self._audit = audit
        self._tracer = tracer

    def begin(self, api: str, operation: str, headers: Mapping[str, str]) -> Call:
        """Begin a call in the running task; its span joins the trace that the headers name, or begins one.

        Args:
            api: name of the API's method, for metrics and span.
            operation: "" where nothing is generated or read: such a call has no span and no duration.
            headers: those of an HTTP request, or a gRPC call's metadata, with names in lower case.
        """
        caller = caller_context(headers.get("traceparent", ""), headers.get("tracestate", ""))
        call = Call(self._metrics, self._tracer, self._audit, caller, api=api, operation=operation)
        if operation not in ("", RESUME):
            call.begin_span(caller)
        return call


logger = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True)
class RedisTimeout:
    """Bounds the time of single replies of Redis: a client can retry a refused call, but not one that hangs."""

    seconds: float

    async def wait(self, answer: Awaitable[T]) -> T:
        """Return a reply of Redis. Raises Unavailable where it refuses, or takes longer than `seconds`.

        What Redis said goes to the log.
        """
        try:
            async with asyncio.timeout(self.seconds):
                return await answer
        except Unavailable as error:
            logger.warning("refused: %s", error)
            raise
        except TimeoutError as error:
            logger.warning("Redis took longer to answer than %g s", self.seconds)
            raise Unavailable("Redis took too long to answer") from error
