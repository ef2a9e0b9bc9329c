"""How a client behaves when connections die."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Reconnection:
    """How long a client tries, and how often."""

    limit_s: float = 130.0
    """Without any progress: longer than the restart of an engine, a gateway or Redis takes, and by a last try longer
    than the 120 s for which gateways themselves wait for Redis (`outage_limit_s`)."""
    first_delay_s: float = 0.05
    """Before the first try at a gateway that has not failed; the delay is drawn from 0 to this, so that the clients
    of a dead gateway do not come to the next one at once."""
    max_delay_s: float = 2.0
    """Between two rounds over all gateways; the delay doubles up to this, and half of it is chance."""
    settle_s: float = 5.0
    """After a request's deadline: to hear how the request ended. The deadline ends it in Redis, not at this client."""
    internal_tries: int = 3
    """Of a call that a gateway answers with an internal error; the next gateway may know better."""

    def __post_init__(self) -> None:
        if self.limit_s < 0 or self.settle_s < 0 or not 0 < self.first_delay_s <= self.max_delay_s:
            raise ValueError(f"limits must not be negative, and 0 < first_delay_s <= max_delay_s must hold; got {self}")


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
