"""What a request is called and where it is: ids, keys and channels, partitions, and beginnings of prompts.

- An id is "<model tag>-<partition, 4 hex digits>-<96 random bits, 24 hex digits><tenant tag, 8 hex digits>": whoever
  has it finds the request's partition, and a wrong tenant is refused without Redis.
- The keys of a partition share a hash tag: a Redis Cluster has them on one node.
- The partitions of a model are divided between its engines by names alone, so that each process finds the same owners.
- Digests of a prompt's beginnings are equal for prompts that begin alike, in whatever process they are computed.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

_FORM = re.compile(r"([0-9a-f]{8})-([0-9a-f]{4})-([0-9a-f]{32})", re.ASCII)

_RANDOM_DIGITS = 24

DEFAULT_PARTITIONS = 4
"""Partitions of a new model unless it is published with another number; the autoscaling study uses the same."""
MAX_PARTITIONS = 1024
"""Most partitions of a model; ids can name more, which a model of an earlier version may have."""


class RequestId(NamedTuple):
    """A request id in its parts."""

    model_tag: str
    partition: int
    unique: str

    def is_of(self, tenant: str) -> bool:
        """Return whether it was created for the tenant; of other tenants' ids one in 2**32 passes."""
        return self.unique[_RANDOM_DIGITS:] == _tenant_tag(self.unique[:_RANDOM_DIGITS], tenant)

    def __str__(self) -> str:
        """Format the id as clients see it."""
        return f"{self.model_tag}-{self.partition:04x}-{self.unique}"


def model_tag(model: str) -> str:
    """Return the first 8 hexadecimal digits of the SHA-256 of a model's name."""
    return hashlib.sha256(model.encode()).hexdigest()[:8]


def new_request_id(model: str, partition: int, tenant: str) -> str:
    """Create an id for a tenant. Its random part keeps ids from being guessed."""
    random = secrets.token_hex(_RANDOM_DIGITS // 2)
    return str(RequestId(model_tag(model), partition, random + _tenant_tag(random, tenant)))


def parse_request_id(text: str) -> RequestId | None:
    """Return the parts of an id; None for a malformed one."""
    match = _FORM.fullmatch(text)
    if match is None:
        return None
    tag, partition, unique = match.groups()
    return RequestId(tag, int(partition, 16), unique)


def _tenant_tag(random: str, tenant: str) -> str:
    # With the random digits, so that ids don't show which of them are one tenant's.
    return hashlib.sha256(f"{random}:{tenant}".encode()).hexdigest()[:8]


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
    def engine_models(self) -> str:
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


def partitions_of(engine: str, partitions: int, engines: Collection[str]) -> Sequence[int]:
    """Return the partitions that an engine owns among the living `engines`; it counts as living itself."""
    return ownership(partitions, frozenset({*engines, engine}))[engine]


@lru_cache(maxsize=16)  # heartbeats and placements ask again and again: 64 engines and 256 partitions take 30 ms
def ownership(partitions: int, engines: frozenset[str]) -> Mapping[str, Sequence[int]]:
    """Return the partitions of each engine, in order: equally many, or one more.

    The pairs with the highest hashes are taken first (rendezvous hashing), as far as the engine has room, so that all
    processes find the same and an engine that comes or goes moves few partitions of the others.
    """
    if not engines:
        return {}
    pairs = sorted(
        ((_weight(engine, number), engine, number) for engine in engines for number in range(partitions)), reverse=True
    )
    least, more = divmod(partitions, len(engines))
    found: dict[str, list[int]] = {engine: [] for engine in engines}
    taken = set[int]()
    for _, engine, number in pairs:
        if number in taken:
            continue
        if len(found[engine]) > least or (len(found[engine]) == least and not more):
            continue
        more -= len(found[engine]) == least
        found[engine].append(number)
        taken.add(number)
    return {engine: sorted(numbers) for engine, numbers in found.items()}


def _weight(engine: str, partition: int) -> bytes:
    return hashlib.blake2b(f"{partition}:{engine}".encode(), digest_size=8).digest()


MOST_TOKENS = 32_768
"""Of a prompt; what follows does not decide where it runs."""
DIGEST_BYTES = 8
_STEPS_BITS = 4  # an octave of lengths has 8 to 16 beginnings


class Prefix(NamedTuple):
    """A prompt's beginning."""

    num_tokens: int
    digest: bytes


def prefixes_of(prompt_token_ids: Sequence[int], first_tokens: int, cache_salt: bytes = b"") -> list[Prefix]:
    """Return a prompt's beginnings, shortest first.

    They end at the same places in all prompts: at multiples of `first_tokens`, and of its double, fourfold... where
    they are longer than 16 times that. A prompt that is shorter than `first_tokens` has none.

    Args:
        prompt_token_ids: each below 2**32.
        first_tokens: the length of the shortest one, a power of two.
        cache_salt: prompts with another one have nothing in common (docs/design/prefix-cache.md).
    """
    tokens = array("I", prompt_token_ids[:MOST_TOKENS])
    hashed = hashlib.blake2b(len(cache_salt).to_bytes(8) + cache_salt, digest_size=DIGEST_BYTES)
    found, end = list[Prefix](), 0
    while True:
        start, end = end, end + first_tokens * (1 << max(0, (end // first_tokens).bit_length() - _STEPS_BITS))
        if end > len(tokens):
            return found
        hashed.update(tokens[start:end])
        found.append(Prefix(end, hashed.digest()))
