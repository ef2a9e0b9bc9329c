"""Settings of the durable token stream, with units and reasons, and the forms of Redis addresses.

They are read and checked before redis-py is imported.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from pagestream_telemetry.environment import fields_of, out_of_range, read_environment, variable_of

from pagestream_streams.protocol.keys import DEFAULT_PREFIX, Keyspace

GROUP = "BROKER"


@dataclass(frozen=True)
class StreamsSettings:
    """Settings of a process. All processes of a deployment should have the same; a difference costs only time."""

    # -- connection --
    connect_timeout_s: float = 10.0
    """Seconds that Broker.connect waits for a server that is still starting."""
    command_timeout_s: float = 5.0
    """Seconds after which a command without a reply counts as lost."""
    max_connections: int = 64
    """Most connections of a process, one for each command in flight."""

    key_prefix: str = DEFAULT_PREFIX
    """Begins every key and channel. Deployments on one Redis need different ones; a change hides what is stored."""

    # -- durability of writes before their client hears of them, see docs/durability.md --
    wait_replicas: int = 0
    """Replicas that must have a write (WAIT); 0 doesn't wait."""
    wait_fsync: bool = False
    """Whether the server's disk must have a write (WAITAOF, from Redis 7.2 on, with appendfsync always)."""
    wait_timeout_ms: int = 3000
    """Milliseconds after which a write that waits counts as not done, and is tried again. With everysec a disk is
    synced once a second, and a replica says once a second what its disk has. Below command_timeout_s."""

    # -- liveness --
    lease_ms: int = 1500
    """Milliseconds of silence after which an engine or gateway is dead; its requests are reclaimed within sweep_ms."""
    heartbeat_ms: int = 300
    """Milliseconds between heartbeats: five in a lease."""
    sweep_ms: int = 300
    """Milliseconds between sweeps: how late leases, deadlines and graces may take effect."""
    sweep_gap_ms: int = 900
    """A longer hole in the sweeps counts as an outage of Redis. At least two heartbeats less than lease_ms."""
    sweep_batch: int = 512
    """Most requests that one run of a sweep moves, so that no script blocks Redis for long."""

    # -- queue; the bounds are for each class in each partition --
    max_queued_requests: int = 1024
    """About 10 MB of Redis memory at 2,000 prompt tokens a request."""
    max_queued_prompt_tokens: int = 4_000_000
    """Twice the tokens of max_queued_requests at 2,000 prompt tokens a request."""
    ageing_ms: int = 30_000
    """Milliseconds that a class waits longer than the class above it, at most."""
    steal_after_ms: int = 100
    """Milliseconds for which an entry is left to its partition's own engine; then any engine may claim it."""
    steal_held_us: int = 1000
    """Microseconds for which an entry is left to that engine longer, for each token of its prompt that the engine has
    cached: twenty times what a large model takes to compute one, since the turns that follow are found there, too; ...
    """
    steal_held_most_ms: int = 4000
    """... and at most so many milliseconds, for which engines with requests of their own may overtake it; ..."""
    steal_idle_ms: int = 1000
    """... and at most so many for an engine with room and nothing of its own: it would stand idle. One that owns no
    partition never has anything of its own: it leaves nothing longer."""
    placement_tokens: int = 64
    """Tokens of the shortest beginning of a prompt by which gateways and engines know it again; a power of two."""
    placement_digests: int = 131_072
    """Beginnings of prompts that a gateway remembers for each model, with the engines that have computed them: those of
    3,000 prompts of 8,000 tokens that have nothing in common, in 23 MB; 43 MB where each is held by nine engines."""
    placement_most_work: float = 1.3
    """What an engine may have got from a gateway in the last 30 s, as a multiple of what the others have on average,
    before a prompt whose beginning it holds goes to another one. Above 1."""
    drain_window_ms: int = 10_000
    """Milliseconds over which the drain rate is measured."""
    retry_after_max_s: float = 60.0
    """Longest retry delay given to a client, also when nothing drains."""

    # -- tenants' shares of those bounds --
    tenant_weights: Mapping[str, int] = field(default_factory=dict)
    """A tenant's share is its weight among those of tenants that wait; 1 for tenants that are not named."""
    tenant_alone_percent: int = 100
    """What a tenant may use while no other waits. Less keeps room for the next tenant."""

    # -- what a tenant's logs take in Redis, see docs/design/admission.md --
    tenant_log_bytes: int = 0
    """Most bytes of the records and logs of one tenant, those that are kept and those that may still be written; 0: no
    limit. Set it where tenants that don't trust each other share a Redis.
    """
    tenant_log_limits: Mapping[str, int] = field(default_factory=dict)
    """The same limit for tenants with one of their own."""

    # -- what tenants use, see docs/design/admission.md --
    usage_days: int = 35
    """Days for which the usage of each tenant, credential and model is kept by day; 0: usage is not counted."""
    usage_hours: int = 48
    """Hours for which it is also kept by hour."""

    # -- requests that kill engines, see docs/design/fencing.md --
    control_leases: float = 4.0
    """How long, in leases, engines run without suspects between two runs of suspects."""
    storm_leases: float = 20.0
    """How long, in leases, an engine's death counts as evidence that requests it did not run are innocent."""
    alone_after_ms: int = 1000
    """Milliseconds that a suspect waits for an idle engine; then one is chosen to hand back all it holds."""
    dead_retention_s: int = 7 * 24 * 3600
    """Seconds for which a quarantined request can be shown and requeued."""
    max_dead: int = 1000
    """Quarantined requests kept in each partition, about; the oldest go first."""

    # -- begun requests --
    fingerprint_grace_ms: int = 30_000
    """Milliseconds that a begun request waits for an engine with the fingerprint of its last one."""

    # -- reading --
    silence_ms: int = 30_000
    """Milliseconds that a client may need to notice its gateway's death; graces are longer by this."""
    poll_ms: int = 250
    """Milliseconds without a wake-up after which a reader's log is polled."""
    read_batch: int = 512
    """Most entries of one read of a log."""
    read_bytes: int = 16 * 1024
    """Bytes of packed entries that a reader takes at once, about. Parsed and written as JSON they take ten times as
    much, which a client that has stopped reading holds.
    """
    buffer_bytes: int = 64 * 1024
    """Most bytes of wake-ups that wait for a slow reader; beyond, they are dropped and the log is read instead."""
    buffers_bytes: int = 64 * 1024 * 1024
    """Most bytes of wake-ups that wait for all readers of a process."""
    outage_limit_s: float = 120.0
    """Seconds that a reader waits for Redis to come back."""
    accepted_unread_ms: int = 5000
    """Milliseconds after which a gateway that accepted a request and does not read it stops counting as a reader."""

    # -- retention --
    retention_s: int = 3600
    """Seconds for which a finished log can be read."""
    max_listed_requests: int = 10_000
    """Most requests in the list of a tenant, the newest; about 1.2 MB of Redis memory."""
    directory_ttl_s: float = 1.0
    """Seconds after which a process reads the models and engines again."""

    @cached_property
    def beat_limit_s(self) -> float:
        """Seconds that a heartbeat waits for its replies: after a lost one another follows within the lease."""
        return self.lease_ms / 3000

    @cached_property
    def control_ms(self) -> int:
        """`control_leases` in milliseconds."""
        return int(self.control_leases * self.lease_ms)

    @cached_property
    def storm_ms(self) -> int:
        """`storm_leases` in milliseconds."""
        return int(self.storm_leases * self.lease_ms)

    def __post_init__(self) -> None:
        """Refuse values that make a living engine look dead after an outage, and bounds that admit nothing."""
        Keyspace(self.key_prefix)
        if self.control_leases * self.lease_ms <= self.lease_ms + self.sweep_ms:
            raise ValueError(
                f"control_leases ({self.control_leases}) must be longer than a lease and sweep_ms ({self.sweep_ms}): "
                "another engine's death would be noticed too late to count for a suspect"
            )
        if not 1 <= self.tenant_alone_percent <= 100:
            raise ValueError(f"tenant_alone_percent must be 1 to 100, got {self.tenant_alone_percent}")
        if any(weight < 1 for weight in self.tenant_weights.values()):
            raise ValueError(f"tenant_weights must be whole numbers from 1 on, got {dict(self.tenant_weights)}")
        if any(limit < 1 for limit in self.tenant_log_limits.values()):
            raise ValueError(f"tenant_log_limits must be bytes from 1 on, got {dict(self.tenant_log_limits)}")
        if self.sweep_gap_ms + 2 * self.heartbeat_ms > self.lease_ms:
            raise ValueError(
                f"lease_ms ({self.lease_ms}) must not be below sweep_gap_ms + 2 * heartbeat_ms "
                f"({self.sweep_gap_ms} + 2 * {self.heartbeat_ms}): an engine that lived through an outage shorter "
                "than the gap, and whose next beat is late, would be taken for dead"
            )
        if self.sweep_gap_ms <= self.sweep_ms:
            raise ValueError(
                f"sweep_gap_ms ({self.sweep_gap_ms}) must be above sweep_ms ({self.sweep_ms}): "
                "each sweep would be taken for the end of an outage"
            )


def settings_from_environment(environ: Mapping[str, str]) -> StreamsSettings:
    """Read `PAGESTREAM_BROKER__<FIELD>`; weights and limits are written "tenant=2,other=1".

    Raises:
        VariableError: a field is unknown, or a value malformed or negative.
        ValueError: the values don't fit each other.
    """
    given = read_environment(environ, {GROUP: fields_of(StreamsSettings)})[GROUP]
    for name, value in given.items():
        if isinstance(value, int | float) and value < 0:
            raise out_of_range(GROUP, name, value, "a number of at least 0")
    try:
        return StreamsSettings(**given)
    except ValueError as error:
        raise ValueError(f"{variable_of(GROUP, '*')}: {error}") from error


SCHEMES = (
    "redis://",
    "rediss://",
    "unix://",
    "redis+sentinel://",
    "rediss+sentinel://",
    "redis+cluster://",
    "rediss+cluster://",
)
"""Schemes of addresses; "rediss" is TLS."""


class AddressParts(NamedTuple):
    """A Redis address in its parts."""

    scheme: str
    login: str
    """What stands before the last `@` of the hosts."""
    hosts: tuple[str, ...]
    """Each `host[:port]`, an IPv6 address in brackets."""
    path: str
    query: str


def split_url(url: str) -> AddressParts:
    """Split a Redis address, which may name several hosts. `urlsplit` of some Pythons refuses such with IPv6 addresses:
    it takes all hosts for one.
    """
    scheme, _, rest = url.partition("://")
    [authority] = re.findall(r"\A[^/?#]*", rest)
    path, _, query = rest[len(authority) :].partition("#")[0].partition("?")
    login, _, hosts = authority.rpartition("@")
    return AddressParts(scheme, login, tuple(hosts.split(",")), path, query)
