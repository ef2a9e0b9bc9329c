"""Every number that this package turns on, with its unit and its reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pagestream_telemetry.environment import fields_of, read_environment, variable_of
from pagestream_telemetry.errors import VariableError

GROUP = "BROKER"


@dataclass(frozen=True)
class StreamsSettings:
    """All processes of a deployment should use the same values; a difference costs time, never correctness."""

    # -- the connection
    connect_timeout_s: float = 10.0  # how long Broker.connect waits for a server that is still starting
    command_timeout_s: float = 5.0  # a command without a reply for so long counts as lost
    max_connections: int = 64  # a process needs one for each command in flight
    # -- how safe a write is before its client hears of it, see docs/durability.md
    wait_replicas: int = 0  # replicas that have it (WAIT); 0 doesn't wait
    wait_fsync: bool = False  # whether the server's own disk has it (WAITAOF, from 7.2 on; with appendfsync always)
    wait_timeout_ms: int = 1000  # after which it counts as not done, and is tried again
    # -- liveness
    lease_ms: int = 1500  # an engine or gateway that is silent for so long is dead; reclaim follows within sweep_ms
    heartbeat_ms: int = 300  # five chances in a lease
    sweep_ms: int = 300  # how late time's effects may be
    sweep_gap_ms: int = 900  # a longer hole in the sweeps was an outage; two heartbeats less than lease_ms, or more
    sweep_batch: int = 128  # requests that one sweep moves, so that no script blocks Redis for long
    # -- the queue; bounds are for each class in each partition
    max_queued_requests: int = 1024  # about 10 MB of Redis memory at 2,000 prompt tokens a request
    max_queued_prompt_tokens: int = 4_000_000  # twice what as many requests of 2,000 tokens have
    ageing_ms: int = 30_000  # a class waits so much longer than the class above it, and no longer
    steal_after_ms: int = 100  # an entry that its partition's own engine left for so long is anybody's
    placement_tokens: int = 64  # prompts that are equal so far share a partition, and so an engine's prefix cache
    overload_factor: int = 2  # the second choice is taken when the first has so many times its queue ...
    overload_requests: int = 16  # ... and more than this
    drain_window_ms: int = 10_000  # the span over which the drain rate is measured
    retry_after_max_s: float = 60.0  # also what is said when nothing drains
    # -- tenants, of the bounds above
    tenant_weights: Mapping[str, int] = field(
        default_factory=dict
    )  # a tenant's share is its weight among those that wait; 1 where it isn't named
    tenant_alone_percent: int = 100  # what a tenant may use while no other waits; less keeps room for who comes next
    # -- poison, see docs/decisions/0024
    control_leases: float = 4.0  # how long, in leases, engines run without suspects between two runs of suspects
    storm_leases: float = 20.0  # how long, in leases, an engine's death speaks for requests that it did not run
    alone_after_ms: int = 1000  # a suspect waits so long for an idle engine; then one hands everything back for it
    dead_retention_s: int = 7 * 24 * 3600  # how long a quarantined request can be shown and requeued
    max_dead: int = 1000  # in each partition, about; the oldest go first
    # -- which engines go on with a request that has tokens
    fingerprint_grace_ms: int = 30_000  # it waits so long for an engine that computes as its last one did
    # -- reading
    silence_ms: int = 30_000  # a client may notice so late that its gateway died: graces are then so much longer
    poll_ms: int = 250  # a reader without a wake-up for so long looks into the log
    read_batch: int = 512  # entries that one read of the log takes
    buffer_entries: int = 1024  # what a slow reader keeps in memory before it is sent to the log
    outage_limit_s: float = 120.0  # how long a reader waits for Redis to come back
    accepted_unread_ms: int = (
        5000  # an accepted request that nobody of its gateway began to read is no longer read by it
    )
    # -- keeping
    retention_s: int = 3600  # how long a finished log can be read again
    directory_ttl_s: float = 1.0  # how old a process' knowledge of models and engines may be

    @property
    def beat_limit_s(self) -> float:
        """How long an engine waits for the answer to a beat: when that is lost, another one comes within the lease."""
        return self.lease_ms / 3000

    @property
    def control_ms(self) -> int:
        """`control_leases` in milliseconds."""
        return int(self.control_leases * self.lease_ms)

    @property
    def storm_ms(self) -> int:
        """`storm_leases` in milliseconds."""
        return int(self.storm_leases * self.lease_ms)

    def __post_init__(self) -> None:
        """Refuses what would make a living engine look dead after an outage, and bounds that admit nobody."""
        if self.control_leases * self.lease_ms <= self.lease_ms + self.sweep_ms:
            raise ValueError(
                f"control_leases ({self.control_leases}) must be longer than a lease and sweep_ms ({self.sweep_ms}): "
                "another engine's death would be noticed too late to speak for a suspect"
            )
        if not 1 <= self.tenant_alone_percent <= 100:
            raise ValueError(f"tenant_alone_percent must be 1 to 100, not {self.tenant_alone_percent}")
        if any(weight < 1 for weight in self.tenant_weights.values()):
            raise ValueError(f"tenant_weights must be whole numbers from 1 on, not {dict(self.tenant_weights)}")
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
    """Read `PAGESTREAM_BROKER__<FIELD>`; weights are written "tenant=2,other=1".

    Raises:
        VariableError: a field is unknown, or a value malformed or negative.
        ValueError: the values don't fit each other.
    """
    given = read_environment(environ, {GROUP: fields_of(StreamsSettings)})[GROUP]
    for name, value in given.items():
        if isinstance(value, int | float) and value < 0:
            raise VariableError(variable_of(GROUP, name), f"{value} was given, a number of at least 0 is expected")
    try:
        return StreamsSettings(**given)
    except ValueError as error:
        raise ValueError(f"{variable_of(GROUP, '*')}: {error}") from error
