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
from pagestream_telemetry.instruments import Distribution, Registry
from pagestream_telemetry.tracing import Span, SpanKind, TraceContext, Tracer, caller_context, set_trace

from pagestream_gateway.auth.audit import Audit
from pagestream_gateway.auth.identity import Identity


class Metrics:
    """Counters, gauges and distributions of one gateway process. All use is from the event loop."""

    def __init__(self, registry: Registry) -> None:
        self.open_streams = registry.number(catalog.STREAMS_OPEN).series()
        """Answers that are being written."""
        self.open_streams.set(0)
        self.tokens = registry.number(catalog.GATEWAY_TOKENS).series()
        """Tokens that were written to a client."""
        self.requests = registry.number(catalog.GATEWAY_REQUESTS)
        """Calls that ended, by API ("chat", "completions", "resume", "grpc" or another name of a gRPC method, or "http"
        for a connection that is refused before there is a call) and outcome ("ok", "disconnected" or an error's code).
        """
        self.errors = registry.number(catalog.ERRORS)
        """Calls that ended with an error, by model and code."""
        self.cancellations = registry.number(catalog.CANCELLATIONS)
        """Requests that their client cancelled or left, by model."""
        self.first_token = registry.distribution(catalog.TIME_TO_FIRST_TOKEN)
        """Seconds from a call's begin to its first token, by model and operation."""
        self.per_token = registry.distribution(catalog.TIME_PER_OUTPUT_TOKEN)
        """Mean seconds per token after the first, of an answer that was written whole, likewise."""
        self.duration = registry.distribution(catalog.REQUEST_DURATION)
        """Seconds that a call took, by model, operation and the error's code, "" on success."""
        self.between_tokens = registry.distribution(catalog.INTER_TOKEN_LATENCY)
        """Seconds between two batches of tokens of one call, by model."""


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
        self._between: Distribution | None = None
        """Where the times between its tokens go; None before the first."""
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
        if self._between is not None:
            self._between.record(now - self._last_at)
        else:
            self._begin_tokens(now, number)
        self._last_at = now
        self._tokens += number
        self._metrics.tokens.add(number)

    def end(self, outcome: str) -> None:
        """Record the outcome: "ok", "disconnected", or an error's code. Later calls do nothing."""
        if not self._is_open:
            return
        self._is_open = False
        self._metrics.requests.series(self.api, outcome).add()
        if self._span is not None:
            self._end_span(self._span, outcome)
        if self._identity is not None and self._audit.is_on:
            self._end_audit(self._identity, outcome)
        if outcome == DISCONNECTED:
            self._metrics.cancellations.series(self._model).add()
        elif outcome != OK:
            self._metrics.errors.series(self._model, outcome).add()
        if not self._operation or self._operation == RESUME:
            return
        error_type = "" if outcome == OK else outcome
        took_s = time.perf_counter() - self._started
        self._metrics.duration.series(self._model, self._operation, error_type).record(took_s)
        more = self._tokens - self._first_count
        if outcome == OK and more > 0:
            mean_s = (self._last_at - self._first_at) / more
            self._metrics.per_token.series(self._model, self._operation).record(mean_s)

    def _end_audit(self, identity: Identity, outcome: str) -> None:
        if self._spec is not None:
            self._audit.ended(identity, self.api, self._spec, outcome, self._tokens)
        elif outcome != OK:
            self._audit.refused(identity, self.api, outcome)

    def _begin_tokens(self, now: float, number: int) -> None:
        self._first_at, self._first_count = now, number
        self._between = self._metrics.between_tokens.series(self._model)
        if self._span is not None:
            self._span.event("first_token")
        if self._operation != RESUME:
            self._metrics.first_token.series(self._model, self._operation).record(now - self._started)

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
