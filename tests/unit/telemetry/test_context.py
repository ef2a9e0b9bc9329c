import asyncio

import pytest
from pagestream_telemetry.context import NO_TRACE, TraceContext, caller_context, current_trace, set_trace, within_trace

PARENT = f"00-{'a' * 32}-{'b' * 16}-01"


def test_a_callers_trace_is_parsed() -> None:
    context = caller_context(PARENT, "vendor=1")
    assert (context.trace_id, context.span_id, context.tracestate) == ("a" * 32, "b" * 16, "vendor=1")
    assert context


@pytest.mark.parametrize(
    "traceparent",
    [
        "",
        "nonsense",
        f"00-{'0' * 32}-{'b' * 16}-01",
        f"00-{'a' * 32}-{'0' * 16}-01",
        f"ff-{'a' * 32}-{'b' * 16}-01",
        f"00-{'A' * 32}-{'b' * 16}-01",
        f"{PARENT}-more",
        f"{PARENT}\n",
    ],
)
def test_a_malformed_trace_is_no_trace(traceparent: str) -> None:
    assert caller_context(traceparent, "vendor=1") == NO_TRACE
    assert not NO_TRACE
    assert (NO_TRACE.trace_id, NO_TRACE.span_id) == ("", "")


def test_a_long_state_is_cut() -> None:
    assert len(caller_context(PARENT, "x" * 5000).tracestate) == 512


async def test_each_task_has_its_own_trace() -> None:
    async def other() -> TraceContext:
        set_trace(TraceContext(PARENT))
        return current_trace()

    assert (await asyncio.create_task(other())).trace_id == "a" * 32
    assert current_trace() == NO_TRACE
    with within_trace(TraceContext(PARENT)):
        assert current_trace().trace_id == "a" * 32
    assert current_trace() == NO_TRACE
