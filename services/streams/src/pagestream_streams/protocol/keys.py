"""The names of Redis keys and channels. Keys of one partition share a hash tag, so that Redis Cluster keeps them
together.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

MODELS = "ps:models"


class Partition(NamedTuple):
    """One of the parts into which a model's requests fall."""

    model: str
    number: int

    @property
    def prefix(self) -> str:
        """What all its keys begin with."""
        return f"ps:{{{self.model}/{self.number}}}:"

    def reads(self, gateway_id: str) -> str:
        """The set of requests that a gateway is registered as a reader of."""
        return f"{self.prefix}reads:{gateway_id}"

    def log(self, request_id: str) -> str:
        """The stream of a request's log."""
        return f"{self.prefix}log:{request_id}"

    def request(self, request_id: str) -> str:
        """The hash of a request."""
        return f"{self.prefix}req:{request_id}"

    def resumes(self, fingerprint: str) -> str:
        """The queue of begun requests whose last engine had this fingerprint."""
        return f"{self.prefix}queue:resume:{fingerprint}"

    @property
    def isolated(self) -> str:
        """The hash of the engines that run a suspect isolated: engine id -> request id."""
        return f"{self.prefix}alone"

    @property
    def dead(self) -> str:
        """The stream of what was quarantined."""
        return f"{self.prefix}dead"


def model(name: str) -> str:
    """The hash of a model's card and number of partitions."""
    return f"ps:model:{name}"


def engines(model_name: str) -> str:
    """The sorted set of a model's living engines."""
    return f"ps:engines:{model_name}"


def engine(engine_id: str) -> str:
    """The hash with an engine's load. It expires; it is never the truth about ownership."""
    return f"ps:engine:{engine_id}"


def doorbell(model_name: str) -> str:
    """The channel that rings when a model has new work. At most once: never the truth."""
    return f"ps:bell:{model_name}"


def wake_ups(gateway_id: str) -> str:
    """The channel of a gateway. At most once: never the truth."""
    return f"ps:gateway:{gateway_id}"


def idempotency(tenant: str, key: str) -> str:
    """The reservation of an idempotency key. Hashed, since both are other people's words of any length."""
    return "ps:idem:" + hashlib.sha256(f"{len(tenant)}:{tenant}{key}".encode()).hexdigest()
