"""Move a slot of a real cluster between masters, step by step, as redis-cli --cluster reshard does."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from pagestream_streams.protocol.keys import Partition
from redis.crc import key_slot
from support.redis.topologies import HOST, Server, Topology

MIGRATE_LIMIT_MS = 5000


@dataclass
class SlotMove:
    """One slot and its source and target."""

    topology: Topology
    slot: int
    source: Server
    target: Server

    @classmethod
    def of(cls, topology: Topology, where: Partition) -> "SlotMove":
        """Plan a move from the master that has a partition to another one."""
        slot = key_slot(where.prefix.encode())
        masters = topology.masters()
        source = next(each for each in masters if slot in slots_of(each))
        return cls(topology, slot, source, next(each for each in masters if each is not source))

    def begin(self) -> None:
        """Begin: from now on the source redirects with ASK for keys that it doesn't have."""
        self.target.ask("CLUSTER", "SETSLOT", self.slot, "IMPORTING", identity(self.source))
        self.source.ask("CLUSTER", "SETSLOT", self.slot, "MIGRATING", identity(self.target))

    def move_some(self, count: int) -> int:
        """Move up to `count` keys; return how many."""
        keys = self.source.ask("CLUSTER", "GETKEYSINSLOT", self.slot, count)
        if not isinstance(keys, list) or not keys:
            return 0
        self.source.ask("MIGRATE", HOST, self.target.port, "", 0, MIGRATE_LIMIT_MS, "KEYS", *keys)
        return len(keys)

    def end(self) -> None:
        """End the move: from now on the source redirects with MOVED."""
        for each in (self.target, self.source, *self.topology.masters()):
            each.ask("CLUSTER", "SETSLOT", self.slot, "NODE", identity(self.target))

    def call_off(self) -> None:
        """Cancel the move; the source keeps the slot."""
        for each in (self.source, self.target):
            each.ask("CLUSTER", "SETSLOT", self.slot, "STABLE")

    def all_at_once(self) -> None:
        """Move the slot with all keys."""
        self.begin()
        while self.move_some(100):
            pass
        self.end()


def identity(each: Server) -> str:
    """Return a node's id."""
    answer = each.ask("CLUSTER", "MYID")
    return answer.decode() if isinstance(answer, bytes) else str(answer)


def slots_of(master: Server) -> set[int]:
    """Return the slots that a master serves by its own table."""
    answer = master.ask("CLUSTER", "NODES")
    text = answer.decode() if isinstance(answer, bytes) else str(answer)
    [own] = [line.split() for line in text.splitlines() if "myself" in line]
    found: set[int] = set()
    for part in own[8:]:
        if not part.startswith("["):
            first, _, last = part.partition("-")
            found |= set(range(int(first), int(last or first) + 1))
    return found


@contextmanager
def without_owner(topology: Topology, where: Partition) -> Iterator[int]:
    """Leave a partition's slot without an owner inside the block: CLUSTERDOWN."""
    slot = key_slot(where.prefix.encode())
    masters = topology.masters()
    owner = next(each for each in masters if slot in slots_of(each))
    for each in masters:
        each.ask("CLUSTER", "DELSLOTS", slot)
    try:
        yield slot
    finally:
        owner.ask("CLUSTER", "ADDSLOTS", slot)
