"""What the parts of an engine's session share: its identity, its partitions, and the requests that it holds."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

from pagestream_streams.admin.broker import Broker
from pagestream_streams.engine.claim_order import ClaimOrder, Doorbell
from pagestream_streams.errors import RequestNotFound
from pagestream_streams.protocol.keys import Keyspace, Partition, parse_request_id, partitions_of
from pagestream_streams.protocol.records import Append, AppendKind, AppendOutcome


class EngineState:
    """What the parts of one session have in common: each of them reads it, and writes what its own methods say."""

    def __init__(self, broker: Broker, identity: EngineIdentity, on_lost: Callable[[Collection[str]], None]) -> None:
        """Create it for an engine that holds nothing. `on_lost` as for EngineSession."""
        self.broker = broker
        self.connection = broker.connection
        self.settings = broker.settings
        self.control_ms = broker.settings.control_ms
        self.identity = identity
        self.on_lost = on_lost
        self.assignment = Assignment()
        self.held = HeldRequests()
        self.claim_order = ClaimOrder()
        self.doorbell = Doorbell(self.claim_order, broker.settings.steal_after_ms / 1000)


@dataclass(frozen=True)
class EngineIdentity:
    """Constant for the life of a session."""

    engine_id: str
    """The given name and a boot nonce: an engine that restarts under its name is another engine."""
    model: str
    fingerprint: str
    """Names what decides the bits of the engine's results (model, mode, kernels, machine); "" matches any."""
    max_model_len: int
    """Longest context in tokens that the engine holds; 0 for no limit."""
    keyspace: Keyspace
    policy: str = ""
    """Its scheduling policy, by which the model's queue goes as well; "" leaves the queue as it is."""

    @classmethod
    def create(
        cls, name: str, *, model: str, fingerprint: str, max_model_len: int, keyspace: Keyspace, policy: str = ""
    ) -> EngineIdentity:
        """Add a boot nonce to a name. ValueError for a name with white space or a colon."""
        if any(character.isspace() or character == ":" for character in name):
            raise ValueError(f"expected an engine id without spaces and colons, got {name!r}")
        return cls(f"{name}:{secrets.token_hex(8)}", model, fingerprint, max_model_len, keyspace, policy)

    def partition(self, number: int) -> Partition:
        """Return a partition of the engine's model."""
        return self.keyspace.partition(self.model, number)

    def partition_of(self, request_id: str) -> Partition:
        """Return the partition that a claimed request's id names, without asking Redis, which may have lost the model.

        RequestNotFound for a malformed id.
        """
        return self.partition(_partition_number(request_id))


@lru_cache(maxsize=8192)
def _partition_number(request_id: str) -> int:
    name = parse_request_id(request_id)
    if name is None:
        raise RequestNotFound(request_id)
    return name.partition


class Assignment:
    """Own partitions are claimed from at once, others only for entries that were left for settings.steal_after_ms."""

    def __init__(self) -> None:
        """Create it without partitions; the first heartbeat sets them."""
        self.partitions: Sequence[Partition] = ()
        """All partitions of the model, as last read."""
        self.own: Sequence[int] = ()
        """Numbers of the partitions of this engine, see protocol/keys.py."""
        self.with_suspects: set[int] = set()
        """Partitions in which a suspect waits for an idle engine, as last heard (docs/design/fencing.md)."""
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


Fence = tuple[int | str, str]
"""Epoch and nonce of a claim, by which scripts refuse what comes from an earlier one."""

_ANY_CLAIM: Fence = ("", "")


class HeldRequests:
    """Ids of claimed requests with the fences of their claims."""

    def __init__(self) -> None:
        """Create it empty."""
        self._fences: dict[str, tuple[int, str]] = {}
        self._claims_in_flight: set[object] = set()
        self._unexpected: dict[str, frozenset[object]] = {}

    def __iter__(self) -> Iterator[str]:
        """Iterate over a copy of the ids."""
        return iter(list(self._fences))

    def __contains__(self, request_id: object) -> bool:
        """Return whether a request is held."""
        return request_id in self._fences

    def __len__(self) -> int:
        """Return the number of requests held."""
        return len(self._fences)

    def add(self, request_id: str, epoch: int, nonce: str) -> None:
        """Hold a claimed request; a later claim of the same request replaces the fence."""
        self._fences[request_id] = (epoch, nonce)

    def drop(self, request_ids: Collection[str]) -> None:
        """Stop holding requests that are finished, lost or handed back."""
        for request_id in request_ids:
            self._fences.pop(request_id, None)

    def settle(self, append: Append, outcome: AppendOutcome) -> bool:
        """Drop the request of an append that ended it or showed it as lost; return whether it did.

        A request that was claimed again since stays held.
        """
        finished = outcome.kind is AppendKind.OK and append.ends
        is_over = finished or outcome.lost
        if is_over and self.fence(append.request_id) == (append.epoch, append.nonce):
            self.drop([append.request_id])
        return is_over

    def fence(self, request_id: str) -> Fence:
        """Return a request's fence; ("", "") where it isn't held, which scripts match with any claim of this engine."""
        return self._fences.get(request_id, _ANY_CLAIM)

    def snapshot(self) -> Mapping[str, tuple[int, str]]:
        """Copy the fences. Take it before Redis is asked, see `lost`."""
        return dict(self._fences)

    @contextmanager
    def claiming(self) -> Iterator[None]:
        """Mark a claim as in flight: until its reply, Redis may show requests that are not held yet."""
        token = object()
        self._claims_in_flight.add(token)
        try:
            yield
        finally:
            self._claims_in_flight.discard(token)

    def lost(self, before: Mapping[str, tuple[int, str]], owned: Collection[str]) -> list[str]:
        """Return the requests that Redis no longer shows as this engine's.

        `before` is the snapshot from before Redis was asked, `owned` its answer. What was claimed (again) in between is
        left out.
        """
        return [
            request_id
            for request_id, fence in before.items()
            if request_id not in owned and self._fences.get(request_id) == fence
        ]

    def unclaimed(self, owned: Collection[str]) -> list[str]:
        """Return the requests in `owned` that no claim brought: the reply was lost.

        Call it once for each answer of Redis. A request counts when two answers in a row show it and no claim that was
        in flight at the first one still is.
        """
        unexpected = {each: self._unexpected.get(each) for each in owned if each not in self._fences}
        result = [
            request_id
            for request_id, claims in unexpected.items()
            if claims is not None and not claims & self._claims_in_flight
        ]
        now = frozenset(self._claims_in_flight)
        self._unexpected = {each: now if claims is None else claims for each, claims in unexpected.items()}
        return result
