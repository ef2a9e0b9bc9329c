"""Names of Redis keys and channels. The keys of a partition share a hash tag: a Redis Cluster has them on one node."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

MODELS = "ps:models"


class Partition(NamedTuple):
    """One of the parts into which a model's requests are divided."""

    model: str
    number: int

    @property
    def prefix(self) -> str:
        """Prefix of all its keys."""
        return f"ps:{{{self.model}/{self.number}}}:"

    def reads(self, gateway_id: str) -> str:
        """Return the set of requests of which a gateway is registered as a reader."""
        return f"{self.prefix}reads:{gateway_id}"

    def log(self, request_id: str) -> str:
        """Return the stream of a request's log."""
        return f"{self.prefix}log:{request_id}"

    def request(self, request_id: str) -> str:
        """Return the hash of a request."""
        return f"{self.prefix}req:{request_id}"

    def resumes(self, fingerprint: str) -> str:
        """Return the queue of begun requests whose last engine had this fingerprint."""
        return f"{self.prefix}queue:resume:{fingerprint}"

    @property
    def isolated(self) -> str:
        """The hash of the engines that run a suspect isolated: engine id -> request id."""
        return f"{self.prefix}alone"

    @property
    def dead(self) -> str:
        """The stream of quarantined requests."""
        return f"{self.prefix}dead"


def model(name: str) -> str:
    """Return the hash of a model's card and number of partitions."""
    return f"ps:model:{name}"


def engines(model_name: str) -> str:
    """Return the sorted set of a model's living engines, scored by the end of their leases."""
    return f"ps:engines:{model_name}"


def engine(engine_id: str) -> str:
    """Return the hash of an engine's published load. It expires, and says nothing about ownership."""
    return f"ps:engine:{engine_id}"


def doorbell(model_name: str) -> str:
    """Return the channel of a model's new work: partition numbers, delivered at most once."""
    return f"ps:bell:{model_name}"


def wake_ups(gateway_id: str) -> str:
    """Return the channel of a gateway's wake-ups, delivered at most once."""
    return f"ps:gateway:{gateway_id}"


def idempotency(tenant: str, key: str) -> str:
    """Return the reservation of an idempotency key: a hash, since both texts come from clients and have any length."""
    return "ps:idem:" + hashlib.sha256(f"{len(tenant)}:{tenant}{key}".encode()).hexdigest()
