"""Which partitions are an engine's own, and what it may claim. The heartbeat writes it, claims read it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from pagestream_streams.protocol.keys import Partition, partitions_of


class Assignment:
    """Own partitions are claimed from at once, others only for entries that were left for settings.steal_after_ms."""

    def __init__(self) -> None:
        """Create it without partitions; the first heartbeat sets them."""
        self.partitions: Sequence[Partition] = ()
        """All partitions of the model, as last read."""
        self.own: Sequence[int] = ()
        """Numbers of the partitions of this engine, see protocol/placement.py."""
        self.with_suspects: set[int] = set()
        """Partitions in which a suspect waits for an idle engine, as last heard (docs/decisions/0024)."""
        self.leaves_longer = False
        """Whether an engine lives that holds a longer context: what needs it is left to that engine for ever."""
        self.is_retired = False
        self.same_fingerprint_only = False
        """Whether a retired engine still claims, but only begun requests that no other engine computes alike."""

    @property
    def claims_nothing(self) -> bool:
        """Whether the engine has retired and leaves all queued requests to others."""
        return self.is_retired and not self.same_fingerprint_only

    def assign(self, engine_id: str, living: Collection[str]) -> None:
        """Compute the own partitions from the ids of the living engines."""
        self.own = partitions_of(engine_id, len(self.partitions), living)

    def retire(self) -> None:
        """Give up the own partitions."""
        self.is_retired = True
        self.own = ()
