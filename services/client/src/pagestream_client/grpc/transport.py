"""How gRPC connections are made and watched."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Transport:
    """How connections are made and watched."""

    connect_timeout_s: float = 3.0
    """Until a gateway that does not answer at all counts as failed."""
    keepalive_s: float = 6.0
    """Between two probes of a silent connection. Gateways refuse clients that probe more often than every 5 s."""
    keepalive_timeout_s: float = 2.0
    """Until an unanswered probe ends the connection: a cut cable and a stopped process are noticed by it alone.

    A request is cancelled when it had no reader for a gateway's lease (1.5 s) and the grace (10 s): both times, and a
    try at another gateway that is dead as well, must be less."""
    answer_timeout_s: float = 10.0
    """Of one call that is no stream."""

    def options(self) -> list[tuple[str, int]]:
        """Channel arguments of gRPC."""
        return [
            ("grpc.keepalive_time_ms", _ms(self.keepalive_s)),
            ("grpc.keepalive_timeout_ms", _ms(self.keepalive_timeout_s)),
            # A probe of gRPC's own, for its flow control, holds the others back while it is not answered; it has 60 s.
            ("grpc.http2.ping_timeout_ms", _ms(self.keepalive_timeout_s)),
            ("grpc.http2.max_pings_without_data", 0),
            # This is the connection timeout; the name tells another part of it.
            ("grpc.min_reconnect_backoff_ms", _ms(self.connect_timeout_s)),
            # gRPC would wait up to two minutes before it looks whether a gateway is back.
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 1_000),
            ("grpc.enable_retries", 0),
            ("grpc.max_receive_message_length", -1),
            ("grpc.use_local_subchannel_pool", 1),
        ]


def _ms(seconds: float) -> int:
    return round(seconds * 1000)
