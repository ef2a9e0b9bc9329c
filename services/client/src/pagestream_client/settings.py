"""How long and how often a client retries."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Reconnection:
    """Limits of retries, in seconds; the same for calls and streams, over both protocols."""

    limit_s: float = 130.0
    """Longest time without any progress. Longer than an engine, a gateway or Redis takes to restart, and by one more
    try longer than the 120 s for which gateways themselves wait for Redis (`outage_limit_s`)."""
    first_contact_s: float | None = None
    """The same limit until any gateway has answered, when it is more likely that none runs; each gateway is called at
    least once. None: `limit_s`."""
    first_delay_s: float = 0.05
    """Longest delay before the first try at a gateway that has not failed. The delay is drawn from 0 to this, so that
    the clients of a dead gateway do not reach the next one at the same moment."""
    max_delay_s: float = 2.0
    """Longest delay between two rounds over all gateways. The delay doubles up to this; half of it is random."""
    settle_s: float = 5.0
    """How long a stream goes on reading after the request's deadline, to learn how the request ended: the deadline
    ends it in Redis, not at this client."""
    internal_tries: int = 3
    """Most retries of a call that a gateway answers with an internal error: another gateway may not have the fault."""

    def __post_init__(self) -> None:
        limits = (self.limit_s, self.settle_s, self.first_contact_s or 0.0)
        if min(limits) < 0 or not 0 < self.first_delay_s <= self.max_delay_s:
            raise ValueError(f"limits must not be negative, and 0 < first_delay_s <= max_delay_s must hold; got {self}")
