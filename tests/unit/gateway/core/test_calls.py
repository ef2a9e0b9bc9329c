"""Metrics and spans of calls, with a tracer that keeps its spans in memory."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest
from pagestream.v1.inference_pb2 import SamplingParams
from pagestream.v1.records_pb2 import RequestSpec
from pagestream_gateway.core.calls import CHAT, DISCONNECTED, OK, RESUME, Call, Calls
from pagestream_gateway.core.identities.audit import Audit
from pagestream_gateway.metrics import Metrics
from pagestream_gateway.settings import AuditSettings
from pagestream_telemetry.context import NO_TRACE, TraceContext, current_trace, set_trace
from pagestream_telemetry.instruments import Registry
from pagestream_telemetry.spans import NO_ATTRIBUTES, Attributes, Span, SpanKind

PARENT = f"00-{'a' * 32}-{'b' * 16}-01"
OF_THE_REQUEST = f"00-{'c' * 32}-{'d' * 16}-01"
SPEC = RequestSpec(request_id="r", model="demo", tenant="t", sampling=SamplingParams(max_tokens=9))


@dataclass
class KeptSpan:
    """A span in memory."""

    name: str
    parent: TraceContext
    kind: SpanKind
    attributes: dict[str, object]
    context: TraceContext
    events: list[str] = field(default_factory=list)
    failed: str = ""
    ends: int = 0

    def set(self, attributes: Attributes) -> None:
        self.attributes |= attributes

    def event(self, name: str, attributes: Attributes = NO_ATTRIBUTES) -> None:
        self.events.append(name)

    def fail(self, error_type: str, message: str = "") -> None:
        self.failed = error_type

    def end(self, at_s: float | None = None) -> None:
        self.ends += 1


class KeepingTracer:
    """Keeps its spans."""

    def __init__(self) -> None:
        self.spans: list[KeptSpan] = []

    def start(
        self,
        name: str,
        parent: TraceContext,
        *,
        kind: SpanKind = SpanKind.INTERNAL,
        attributes: Attributes = NO_ATTRIBUTES,
        at_s: float | None = None,
    ) -> Span:
        trace_id = parent.trace_id or "e" * 32
        context = TraceContext(f"00-{trace_id}-{len(self.spans) + 1:016x}-01")
        self.spans.append(KeptSpan(name, parent, kind, dict(attributes), context))
        return self.spans[-1]


@dataclass
class RecordedCalls:
    """A factory of calls whose metrics and spans can be read."""

    registry: Registry = field(default_factory=Registry)
    tracer: KeepingTracer = field(default_factory=KeepingTracer)

    def __post_init__(self) -> None:
        self.calls = Calls(Metrics(self.registry), self.tracer, Audit(AuditSettings()))

    def begin(self, operation: str = CHAT, headers: Mapping[str, str] | None = None) -> Call:
        return self.calls.begin("api", operation, headers or {})

    def count(self, name: str, **attributes: str) -> float:
        """Return a number's value, or the count of a histogram."""
        points = [
            point
            for family in self.registry.collect()
            if family.metric.name == name
            for point in family.points
            if attributes.items() <= point.attributes.items()
        ]
        return sum(point.value + sum(point.counts) for point in points)


@pytest.fixture
def recorded() -> RecordedCalls:
    set_trace(NO_TRACE)
    return RecordedCalls()


async def test_a_call_that_is_answered(recorded: RecordedCalls) -> None:
    call = recorded.begin(headers={"traceparent": PARENT, "tracestate": "v=1"})
    [span] = recorded.tracer.spans
    assert (span.parent, span.kind) == (TraceContext(PARENT, "v=1"), SpanKind.SERVER)
    assert call.context == span.context == current_trace(), "records of the task's log name the span"
    call.accepted(SPEC)
    for number in (1, 0, 2, 1):
        call.tokens(number)
    call.end(OK)
    assert span.events == ["accepted", "first_token"]
    assert (span.ends, span.failed) == (1, "")
    assert span.attributes["gen_ai.usage.output_tokens"] == 4
    assert span.attributes["pagestream.request.id"] == "r"
    named = {"gen_ai.request.model": "demo", "gen_ai.operation.name": "chat"}
    assert recorded.count("gen_ai.server.time_to_first_token", **named) == 1
    assert recorded.count("gen_ai.server.time_per_output_token", **named) == 1
    assert recorded.count("gen_ai.server.request.duration", **named) == 1
    assert recorded.count("pagestream.inter_token_latency") == 2, "between arrivals that have tokens"
    assert recorded.count("pagestream.gateway.tokens") == 4
    assert recorded.count("pagestream.gateway.requests", api="api", outcome="ok") == 1
    assert recorded.count("pagestream.errors") == recorded.count("pagestream.cancellations") == 0


@pytest.mark.parametrize(
    ("outcome", "errors", "cancellations"), [("queue_full", 1, 0), (DISCONNECTED, 0, 1), ("internal_error", 1, 0)]
)
async def test_a_call_that_is_not(recorded: RecordedCalls, outcome: str, errors: int, cancellations: int) -> None:
    call = recorded.begin()
    call.end(outcome)
    call.end(OK)
    [span] = recorded.tracer.spans
    assert (span.parent, span.failed, span.ends) == (NO_TRACE, outcome, 1)
    assert recorded.count("pagestream.errors", **{"error.type": outcome}) == errors
    assert recorded.count("pagestream.cancellations") == cancellations
    assert recorded.count("gen_ai.server.request.duration", **{"error.type": outcome}) == 1
    assert recorded.count("gen_ai.server.time_to_first_token") == 0
    assert recorded.count("pagestream.gateway.requests") == 1


@pytest.mark.parametrize(("headers", "trace_id"), [({}, "c" * 32), ({"traceparent": PARENT}, "a" * 32)])
async def test_a_stream_that_goes_on_belongs_to_its_requests_trace(
    recorded: RecordedCalls, headers: Mapping[str, str], trace_id: str
) -> None:
    call = recorded.begin(RESUME, headers)
    assert recorded.tracer.spans == []
    spec = RequestSpec()
    spec.CopyFrom(SPEC)
    spec.traceparent = OF_THE_REQUEST
    call.resumed(spec)
    call.tokens(3)
    call.end(OK)
    [span] = recorded.tracer.spans
    assert (span.context.trace_id, span.ends) == (trace_id, 1)
    assert recorded.count("gen_ai.server.time_to_first_token") == recorded.count("gen_ai.server.request.duration") == 0
    assert recorded.count("pagestream.gateway.tokens") == 3


async def test_a_call_that_generates_nothing_has_no_span(recorded: RecordedCalls) -> None:
    call = recorded.begin("", {"traceparent": PARENT})
    assert call.context == TraceContext(PARENT)
    call.end("request_not_found")
    assert recorded.tracer.spans == []
    assert recorded.count("pagestream.errors") == recorded.count("pagestream.gateway.requests") == 1
    assert recorded.count("gen_ai.server.request.duration") == 0
