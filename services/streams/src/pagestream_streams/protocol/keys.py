"""Names of Redis keys and channels. The keys of a partition share a hash tag: a Redis Cluster has them on one node."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import NamedTuple

DEFAULT_PREFIX = "ps"

_PREFIX = re.compile(r"[A-Za-z0-9._-]{1,128}")


class Partition(NamedTuple):
    """One of the parts into which a model's requests are divided."""

    model: str
    number: int
    key_prefix: str = DEFAULT_PREFIX
    """Its keyspace's, see Keyspace."""

    @property
    def prefix(self) -> str:
        """Prefix of all its keys."""
        return f"{self.key_prefix}:{{{self.model}/{self.number}}}:"

    @property
    def doorbell(self) -> str:
        """The channel of its model's new work."""
        return Keyspace(self.key_prefix).doorbell(self.model)

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
    def leases(self) -> str:
        """The sorted set of the engines that live for this partition, scored by the end of their leases."""
        return f"{self.prefix}leases"

    @property
    def dead(self) -> str:
        """The stream of quarantined requests."""
        return f"{self.prefix}dead"


@dataclass(frozen=True)
class Keyspace:
    """The keys and channels of one deployment. Deployments that share a Redis have different prefixes.

    Methods: one for each key, so that all names stand in one place.
    """

    prefix: str = DEFAULT_PREFIX
    """Before the first colon of every key and channel."""

    def __post_init__(self) -> None:
        """Refuse a prefix that would be read as another part of a key, or as a hash tag."""
        if not _PREFIX.fullmatch(self.prefix):
            raise ValueError(f"key_prefix: expected 1 to 128 of the characters A-Z a-z 0-9 . _ -, got {self.prefix!r}")

    @property
    def models(self) -> str:
        """The hash of all models: tag -> name."""
        return f"{self.prefix}:models"

    @property
    def adapters(self) -> str:
        """The hash of all LoRA adapters: name -> record."""
        return f"{self.prefix}:adapters"

    @property
    def roster(self) -> str:
        """The hash of the engines that change their models, and of what is asked of them."""
        return f"{self.prefix}:engine-roster"

    def partition(self, model_name: str, number: int) -> Partition:
        """Return one of a model's partitions."""
        return Partition(model_name, number, self.prefix)

    def model(self, name: str) -> str:
        """Return the hash of a model's card and number of partitions."""
        return f"{self.prefix}:model:{name}"

    def engines(self, model_name: str) -> str:
        """Return the sorted set of a model's living engines, scored by the end of their leases."""
        return f"{self.prefix}:engines:{model_name}"

    def engine(self, engine_id: str) -> str:
        """Return the hash of an engine's published load. It expires, and says nothing about ownership."""
        return f"{self.prefix}:engine:{engine_id}"

    def engine_prefixes(self, model_name: str) -> str:
        """Return the stream in which a model's engines publish the beginnings of the prompts that they have claimed."""
        return f"{self.prefix}:engine-prefixes:{model_name}"

    def poison(self, model_name: str) -> str:
        """Return the stream of digests of requests whose equals are refused: see Broker.note_poison. It expires."""
        return f"{self.prefix}:engine-poison:{model_name}"

    def block_map(self, engine_id: str) -> str:
        """Return the map of an engine's KV blocks, which it publishes while its model is watched. It expires."""
        return f"{self.prefix}:engine-map:{engine_id}"

    def watched(self, model_name: str) -> str:
        """Return what is there while somebody looks at a model's engines. It expires."""
        return f"{self.prefix}:engine-watch:{model_name}"

    def doorbell(self, model_name: str) -> str:
        """Return the channel of a model's new work: partition numbers, delivered at most once."""
        return f"{self.prefix}:bell:{model_name}"

    def wake_ups(self, gateway_id: str) -> str:
        """Return the channel of a gateway's wake-ups, delivered at most once."""
        return f"{self.prefix}:gateway:{gateway_id}"

    def requests(self, tenant: str) -> str:
        """Return the list of a tenant's requests: ids by the time of their acceptance."""
        return f"{self.prefix}:requests:" + hashlib.sha256(tenant.encode()).hexdigest()

    def reservation(self, tenant: str, key: str) -> str:
        """Return the prefix of what stands beside an idempotency key's reservation, whose name is its hash tag."""
        return f"{self.prefix}:idem:{{{self.idempotency(tenant, key)}}}:"

    def idempotency(self, tenant: str, key: str) -> str:
        """Return the reservation of an idempotency key: a hash, since both texts come from clients, of any length."""
        return f"{self.prefix}:idem:" + hashlib.sha256(f"{len(tenant)}:{tenant}{key}".encode()).hexdigest()

    def tenant_logs(self, tenant: str) -> str:
        """Return the prefix of the keys that count what a tenant's logs take; they are on one node."""
        return f"{self.prefix}:logs:{{{hashlib.sha256(tenant.encode()).hexdigest()}}}:"

    def tenant_limits(self, tenant: str) -> str:
        """Return the prefix of the keys that count what a tenant uses; they are on one node."""
        return f"{self.prefix}:limits:{{{tenant_tag(tenant)}}}:"

    @property
    def tenants(self) -> str:
        """The sorted set of the tenants that have used anything, by when, in ms."""
        return f"{self.prefix}:tenants"

    def batches(self, tag: str) -> str:
        """Return the prefix of the keys of a tenant's files and batches, by its tag; they are on one node."""
        return f"{self.prefix}:batches:{{{tag}}}:"

    @property
    def active_batches(self) -> str:
        """The sorted set of the batches of all tenants that have not ended: "<tenant tag>/<batch id>" by creation."""
        return f"{self.prefix}:active-batches"

    @property
    def stored_bytes(self) -> str:
        """The hash of what each tenant's files take: tenant tag -> bytes."""
        return f"{self.prefix}:stored-bytes"


def tenant_tag(tenant: str) -> str:
    """Return what stands for a tenant in the names of its files and batches: names come from others, of any form."""
    return hashlib.sha256(tenant.encode()).hexdigest()
