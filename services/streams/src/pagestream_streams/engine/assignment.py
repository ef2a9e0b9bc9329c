"""Which partitions an engine claims from, and in which order. The heartbeat writes it, claims read it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from pagestream_streams.protocol import placement
from pagestream_streams.protocol.keys import Partition


class Assignment:
    """Own partitions are claimed from at once, others only for entries that were left for settings.steal_after_ms."""

    def __init__(self) -> None:
        """Create it without partitions; the first heartbeat sets them."""
        self.partitions: Sequence[Partition] = ()
        """All partitions of the model, as last read."""
        self.own: list[int] = []
        """Numbers of the partitions that rendezvous hashing assigns to this engine."""
        self.with_suspects: set[int] = set()
        """Partitions in which a suspect waited for an idle engine at the last heartbeat (docs/decisions/0024)."""
        self.reserved: int | None = None
        """The own partition whose head is too large for the free room. Until it fits, nothing else is claimed."""
        self.is_retired = False
        self.same_fingerprint_only = False
        """Whether a retired engine still claims, but only begun requests that no other engine computes alike."""

    @property
    def claims_nothing(self) -> bool:
        """Whether the engine has retired and leaves all queued requests to others."""
        return self.is_retired and not self.same_fingerprint_only

    def assign(self, engine_id: str, living: Collection[str]) -> None:
        """Compute the own partitions from the ids of the living engines."""
        self.own = placement.owned(engine_id, len(self.partitions), living)

    def retire(self) -> None:
        """Give up the own partitions."""
        self.is_retired = True
        self.own = []

    def order(self, with_work: Iterable[int], *, is_idle: bool) -> list[int]:
        """Return the partitions that a claim should try, the first one first.

        `with_work` are those that may have entries; `is_idle` says that the engine holds no request: suspects wait for
        that, so their partitions come before all others.
        """
        if is_idle:
            self.reserved = None  # all room is free
        if self.reserved is not None and self.reserved in self.own:
            return [self.reserved]
        self.reserved = None
        first = self.with_suspects if is_idle else set()
        own = set(self.own)
        return sorted({*with_work, *first}, key=lambda number: (number not in first, number not in own, number))
