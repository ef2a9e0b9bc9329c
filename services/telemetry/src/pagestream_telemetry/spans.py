"""The interface of spans, and the implementation that does nothing but propagate the caller's trace.

`otlp_tracing` has the one that exports, so that a process that exports nothing never imports OpenTelemetry's exporters.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Protocol

from pagestream_telemetry.context import TraceContext

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


class NoSpan:
    """Records nothing; its context is its parent's."""

    __slots__ = ("_context",)

    def __init__(self, context: TraceContext) -> None:
        self._context = context

    @property
    def context(self) -> TraceContext:
        """The parent's."""
        return self._context

    def set(self, attributes: Attributes) -> None:
        """Do nothing."""

    def event(self, name: str, attributes: Attributes = NO_ATTRIBUTES) -> None:
        """Do nothing."""

    def fail(self, error_type: str, message: str = "") -> None:
        """Do nothing."""

    def end(self, at_s: float | None = None) -> None:
        """Do nothing."""


class NoTracer:
    """Creates spans that record nothing."""

    def start(
        self,
        name: str,
        parent: TraceContext,
        *,
        kind: SpanKind = SpanKind.INTERNAL,
        attributes: Attributes = NO_ATTRIBUTES,
        at_s: float | None = None,
    ) -> Span:
        """Return a span that records nothing."""
        return NoSpan(parent)


NO_TRACER: Tracer = NoTracer()
