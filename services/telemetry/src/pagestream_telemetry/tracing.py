"""Traces: the context of a request or task, in the form of W3C Trace Context, and the interface of spans.

A process that exports no spans has no tracer: it passes the caller's trace on and records nothing. `otlp` has the
tracer that exports, and is imported for it alone. https://www.w3.org/TR/trace-context/
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Enum
from logging import LogRecord
from typing import NamedTuple, Protocol

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


def add_trace(record: LogRecord) -> bool:
    """Add the running task's trace to a log record that names none. A filter that drops nothing."""
    trace = _current.get()
    if trace.traceparent and not hasattr(record, "trace_id"):
        record.trace_id, record.span_id = trace.trace_id, trace.span_id
    return True


Attributes = Mapping[str, str | int | float | bool]
NO_ATTRIBUTES: Attributes = {}


class SpanKind(Enum):
    """The side of a call that a span describes."""

    SERVER = "server"
    """Answering a call."""
    CONSUMER = "consumer"
    """Taking a queued message."""
    INTERNAL = "internal"
    """Neither."""


class Span(Protocol):
    """A piece of work with a start and an end. Times are Unix seconds; None is now."""

    @property
    def context(self) -> TraceContext:
        """The context for the spans that this work causes."""
        ...

    def set(self, attributes: Attributes) -> None:
        """Set attributes, replacing those of the same name."""

    def event(self, name: str, attributes: Attributes = NO_ATTRIBUTES) -> None:
        """Add an event, now."""

    def fail(self, error_type: str, message: str = "") -> None:
        """Mark the span as failed, with the class of the error; the message must hold nothing that a user sent."""

    def end(self, at_s: float | None = None) -> None:
        """End the span; later calls do nothing."""


class Tracer(Protocol):
    """Creates spans."""

    def start(
        self,
        name: str,
        parent: TraceContext,
        *,
        kind: SpanKind = SpanKind.INTERNAL,
        attributes: Attributes = NO_ATTRIBUTES,
        at_s: float | None = None,
    ) -> Span:
        """Start a span under `parent`; without a parent it starts a trace."""
        ...
