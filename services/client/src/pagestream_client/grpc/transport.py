"""How gRPC connections are made and watched."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Transport:
    """Limits of connections and calls, in seconds."""

    connect_timeout_s: float = 3.0
    """Until a gateway that does not answer at all counts as failed."""
    keepalive_s: float = 6.0
    """Interval of probes of a silent connection. Gateways refuse clients that probe more often than every 5 s."""
    keepalive_timeout_s: float = 2.0
    """Until an unanswered probe ends the connection. Only probes detect a cut cable and a stopped process.

    A request is cancelled when it had no reader for the remaining lease of its gateway (1.5 s) and the grace period
    (10 s). The interval and this time-out, with one try at another gateway that is dead too, must take less."""
    answer_timeout_s: float = 10.0
    """Time-out of a call that is no stream."""

    def options(self) -> list[tuple[str, int]]:
        """Return the channel arguments of gRPC."""
        return [
            ("grpc.keepalive_time_ms", _ms(self.keepalive_s)),
            ("grpc.keepalive_timeout_ms", _ms(self.keepalive_timeout_s)),
            # gRPC sends no keepalive probe while a probe of its flow control is unanswered; the default is 60 s.
            ("grpc.http2.ping_timeout_ms", _ms(self.keepalive_timeout_s)),
            ("grpc.http2.max_pings_without_data", 0),
            # In spite of its name, this is also the connection time-out.
            ("grpc.min_reconnect_backoff_ms", _ms(self.connect_timeout_s)),
            # By default gRPC waits up to two minutes before it tries a gateway again.
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 1_000),
            ("grpc.enable_retries", 0),
            ("grpc.max_receive_message_length", -1),
            ("grpc.use_local_subchannel_pool", 1),
        ]


def _ms(seconds: float) -> int:
    return round(seconds * 1000)
