"""The trace context of a request or task, in the form of W3C Trace Context (https://www.w3.org/TR/trace-context/)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_MAX_TRACESTATE = 512  # characters that are propagated; the specification asks for at least as many


class TraceContext(NamedTuple):
    """Trace and parent span; falsy without a trace."""

    traceparent: str = ""
    tracestate: str = ""

    def __bool__(self) -> bool:
        """Whether there is a trace."""
        return bool(self.traceparent)

    @property
    def trace_id(self) -> str:
        """32 hexadecimal digits; "" without a trace."""
        return self.traceparent[3:35]

    @property
    def span_id(self) -> str:
        """16 hexadecimal digits; "" without a trace."""
        return self.traceparent[36:52]


NO_TRACE = TraceContext()


def caller_context(traceparent: str, tracestate: str) -> TraceContext:
    """Return the context that a caller sent; NO_TRACE where it is missing or malformed."""
    if not _TRACEPARENT.fullmatch(traceparent):
        return NO_TRACE
    return TraceContext(traceparent, tracestate[:_MAX_TRACESTATE])


_current: ContextVar[TraceContext] = ContextVar("pagestream_trace", default=NO_TRACE)


def current_trace() -> TraceContext:
    """Return the trace of the running task; NO_TRACE where none was set."""
    return _current.get()


@contextmanager
def within_trace(context: TraceContext) -> Iterator[None]:
    """Set the running task's trace for the length of a block; its log records name it."""
    token = _current.set(context)
    try:
        yield
    finally:
        _current.reset(token)


def set_trace(context: TraceContext) -> None:
    """Set the running task's trace for the rest of the task."""
    _current.set(context)
