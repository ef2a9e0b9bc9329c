"""Spans: the pieces of a trace. Where nothing is traced they do nothing, and hand the caller's trace on.

OpenTelemetry itself is behind `otlp_tracing`, so that a process that exports nothing never loads its exporters.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Protocol

from pagestream_telemetry.context import TraceContext

Attributes = Mapping[str, str | int | float | bool]
NO_ATTRIBUTES: Attributes = {}


class SpanKind(Enum):
    """Which side of a call a span is."""

    SERVER = "server"
    """Answers a call."""
    CONSUMER = "consumer"
    """Takes what was queued."""
    INTERNAL = "internal"
    """Neither."""


class Span(Protocol):
    """A piece of work with a begin and an end. Times are Unix seconds; None is now."""

    @property
    def context(self) -> TraceContext:
        """The place that what this causes belongs to."""
        ...

    def set(self, attributes: Attributes) -> None:
        """Adds attributes, or replaces them."""

    def event(self, name: str, attributes: Attributes = NO_ATTRIBUTES) -> None:
        """Notes what happened now."""

    def fail(self, error_type: str, message: str = "") -> None:
        """Says that it went wrong, with the class of the error; the message must hold nothing that a user sent."""

    def end(self, at_s: float | None = None) -> None:
        """Ends it; later calls do nothing."""


class Tracer(Protocol):
    """Makes spans."""

    def start(
        self,
        name: str,
        parent: TraceContext,
        *,
        kind: SpanKind = SpanKind.INTERNAL,
        attributes: Attributes = NO_ATTRIBUTES,
        at_s: float | None = None,
    ) -> Span:
        """Begins a span under `parent`; without one it begins a trace."""
        ...


class NoSpan:
    """Nothing is kept; what it causes belongs where it belongs itself."""

    __slots__ = ("_context",)

    def __init__(self, context: TraceContext) -> None:
        self._context = context

    @property
    def context(self) -> TraceContext:
        """The parent's."""
        return self._context

    def set(self, attributes: Attributes) -> None:
        """Does nothing."""

    def event(self, name: str, attributes: Attributes = NO_ATTRIBUTES) -> None:
        """Does nothing."""

    def fail(self, error_type: str, message: str = "") -> None:
        """Does nothing."""

    def end(self, at_s: float | None = None) -> None:
        """Does nothing."""


class NoTracer:
    """Makes spans that do nothing."""

    def start(
        self,
        name: str,
        parent: TraceContext,
        *,
        kind: SpanKind = SpanKind.INTERNAL,
        attributes: Attributes = NO_ATTRIBUTES,
        at_s: float | None = None,
    ) -> Span:
        """A span that does nothing."""
        return NoSpan(parent)


NO_TRACER: Tracer = NoTracer()
