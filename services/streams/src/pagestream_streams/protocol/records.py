"""What passes between this package and its callers."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

from pagestream.v1.inference_pb2 import FinishReason, RequestState, Usage
from pagestream.v1.records_pb2 import LogEntry, RequestSpec


@dataclass(frozen=True)
class ModelInfo:
    """A model that has been published."""

    name: str
    created: int  # unix seconds of its first publication
    digest: str  # of its card
    engines: int  # that live now
    partitions: int


@dataclass(frozen=True)
class RequestView:
    """Where a request stands."""

    request_id: str
    model: str
    tenant: str
    state: RequestState
    queue_position: int | None  # requests before it in its queue; None unless queued
    finish_reason: FinishReason  # UNSPECIFIED unless finished
    next_index: int  # entries in its log
    digest: str  # of its log
    usage: Usage  # so far
    attempts: int  # claims so far
    spec: RequestSpec
    fingerprint: str = ""  # of the engine that claimed it last: how its tokens are computed


@dataclass(frozen=True)
class QuarantinedRequest:
    """A request that was quarantined, because engines died of it (docs/decisions/0024)."""

    request_id: str
    model: str
    tenant: str
    reason: str  # what its client was told
    next_index: int  # entries in its log when the engines died: where requeueing goes on
    attempts: int  # claims in all
    engines: tuple[str, ...]  # ids of those that died with it at that index, the first one first
    quarantined_at: float  # unix seconds, by Redis' clock
    requeued_as: str | None  # the id under which it goes on; None unless it was requeued
    spec: RequestSpec


@dataclass(frozen=True)
class Claim:
    """A request that an engine has got, with what an earlier engine left of it."""

    spec: RequestSpec
    epoch: int
    nonce: str
    next_index: int
    digest: str
    attempts: int  # claims so far, this one included
    cached_tokens: int  # prompt tokens that earlier claims had from a prefix cache
    deadline: float | None  # on this process' time.monotonic() clock
    entries: list[LogEntry] = field(default_factory=list)  # the log so far
    isolated: bool = False  # whether engines died of it: nothing else may run until its log has a new entry
    waited_s: float = 0.0  # seconds in its queue before this claim: since acceptance, or since it was put back

    @property
    def request_id(self) -> str:
        """The spec's."""
        return self.spec.request_id


@dataclass(frozen=True)
class Append:
    """New entries of one request. An entry with `end` is the last one and finishes it."""

    request_id: str
    epoch: int
    nonce: str
    first_index: int  # of entries[0]
    entries: Sequence[LogEntry]  # with their digests, see digests.chain
    previous_digest: str = ""  # of the log before entries[0]: spares readers the proof; "" is not told
    cached_tokens: int | None = (
        None  # prompt tokens from the prefix cache, once known: a cancel writes the usage from it
    )


class AppendKind(enum.IntEnum):
    """What became of an append. The numbers are append.lua's, but the last."""

    OK = 0  # the log has the entries
    FENCED = 1  # another claim owns the request
    CONFLICT = 2  # the log has other entries at these places
    GAP = 3  # entries before these are missing: send again from next_index
    ENDED = 4  # the request has finished otherwise
    MISSING = 5  # Redis knows no such request
    AWAY = 6  # the node of a cluster that has it did not answer: it may have the entries; a retry is harmless


@dataclass(frozen=True)
class AppendOutcome:
    """FENCED, CONFLICT, ENDED and MISSING mean: drop the work. GAP means: send again from `next_index`; AWAY: all."""

    kind: AppendKind
    next_index: int  # of the log; 0 if MISSING or AWAY

    @property
    def lost(self) -> bool:
        """Whether the request is no longer this engine's."""
        return self.kind not in (AppendKind.OK, AppendKind.GAP, AppendKind.AWAY)
