"""What can go wrong on the metrics path, as one tree."""

# ruff: noqa: N818 -- said as people say it: "the sink is unavailable"

from __future__ import annotations


class MetricsError(Exception):
    """The root of this package's errors."""


class SinkUnavailable(MetricsError):
    """The sink can't listen at its address."""

    def __init__(self, address: str) -> None:
        """`address` is host:port."""
        super().__init__(f"the metrics sink can't listen at {address}; is another process there already?")
        self.address = address


class SourceUnavailable(MetricsError):
    """Prometheus can't be reached, or refused a query. Trying again later is right."""
