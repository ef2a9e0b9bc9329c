"""How HTTP connections are made and watched."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class HttpTransport:
    """Time limits of connections and calls, in seconds, and whom a TLS connection trusts."""

    connect_timeout_s: float = 5.0
    """Until a gateway that does not answer at all counts as failed."""
    read_timeout_s: float = 35.0
    """Longest silence of a stream. A gateway sends a sign of life every 15 s while a request waits, so one that is
    silent for longer may be dead."""
    answer_timeout_s: float = 10.0
    """Time-out of a call that is no stream."""
    ca_file: str | None = None
    """File of certificates (PEM) to trust beside the system's authorities; None: the HTTP library's."""
