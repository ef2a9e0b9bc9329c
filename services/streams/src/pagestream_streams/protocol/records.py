"""The records that this package exchanges with its callers."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

from pagestream.v1.inference_pb2 import FinishReason, RequestState, SamplingParams, Usage
from pagestream.v1.records_pb2 import RequestSpec

from pagestream_streams.protocol.claimed_log import ClaimedLog
from pagestream_streams.protocol.entries import END, EntryValues

FINGERPRINT_FIELD, CONTEXT_FIELD, LENGTHS_FIELD = "fingerprint", "context", "lengths"
"""Fields of what an engine publishes of itself: its fingerprint, the longest context that it holds (0: any), and how
long its answers were (see expected_lengths.py)."""


def is_prompt_alone(spec: RequestSpec) -> bool:
    """Whether a request's prompts are computed and no token is generated."""
    return spec.sampling.HasField("max_tokens") and not spec.sampling.max_tokens


def output_bounds(spec: RequestSpec) -> list[int]:
    """Return the most output tokens of a choice of each prompt."""
    most, total = spec.sampling.max_tokens, spec.max_total_tokens
    return [min(most, total - len(prompt.ids)) if total else most for prompt in spec.prompts]


def num_sequences(sampling: SamplingParams) -> int:
    """Return how many sequences are generated for each prompt: its choices, or the candidates or beams for them."""
    width = sampling.beam_width if sampling.use_beam_search else 0
    return max(1, sampling.n, width or sampling.best_of)


def most_output_tokens(spec: RequestSpec) -> int:
    """Return the most tokens that are generated for a request, of all its sequences; one at least of each."""
    return num_sequences(spec.sampling) * sum(max(1, bound) for bound in output_bounds(spec))


@dataclass(frozen=True)
class ModelInfo:
    """A published model."""

    name: str
    created: int
    """Unix seconds of its first publication."""
    digest: str
    """SHA-256 of its card, hexadecimal."""
    engines: int
    """Engines that live now."""
    partitions: int


@dataclass(frozen=True)
class RequestView:
    """Where a request stands."""

    request_id: str
    model: str
    tenant: str
    state: RequestState
    queue_position: int | None
    """Requests that go before it, over all partitions; None unless queued, or where Redis can't say now."""
    expected_wait_ms: int | None
    """Milliseconds until it is claimed: the tokens before it by the drain rate; None where that is unknown."""
    finish_reason: FinishReason
    """UNSPECIFIED unless finished."""
    next_index: int
    """Entries in its log."""
    digest: str
    """Digest of its log."""
    usage: Usage
    """So far."""
    attempts: int
    """Claims so far."""
    spec: RequestSpec
    fingerprint: str = ""
    """Fingerprint of the engine that claimed it last."""
    is_discarded: bool = False
    """Whether its tenant has discarded it: it is about to expire."""


@dataclass(frozen=True)
class RequestSummary:
    """What the list of a tenant's requests shows of one."""

    request_id: str
    model: str
    state: RequestState
    finish_reason: FinishReason
    """UNSPECIFIED unless finished."""
    next_index: int
    """Entries in its log."""
    usage: Usage
    """So far."""
    attempts: int
    """Claims so far."""
    accepted_at: float
    """Unix seconds, by Redis' clock."""
    is_discarded: bool = False
    """Whether it was deleted: its record expires within a minute."""


@dataclass(frozen=True)
class QuarantinedRequest:
    """A request that was quarantined because engines died of it (docs/decisions/0024)."""

    request_id: str
    model: str
    tenant: str
    reason: str
    """The error message that its client got."""
    next_index: int
    """Entries in its log when the engines died: where a requeued one goes on."""
    attempts: int
    """Claims in all."""
    engines: tuple[str, ...]
    """Ids of the engines that died with it at that index, first one first."""
    quarantined_at: float
    """Unix seconds, by Redis' clock."""
    requeued_as: str | None
    """The id under which it goes on; None unless it was requeued."""
    spec: RequestSpec


@dataclass(frozen=True)
class Claim:
    """A request that an engine has claimed, with what earlier engines left of it."""

    spec: RequestSpec
    epoch: int
    nonce: str
    next_index: int
    """Entries in its log."""
    digest: str
    """Digest of its log."""
    attempts: int
    """Claims so far, this one included."""
    cached_tokens: int
    """Prompt tokens that earlier claims had from a prefix cache."""
    deadline: float | None
    """On this process' time.monotonic() clock; None for no deadline."""
    log: ClaimedLog = field(default_factory=ClaimedLog)
    """What earlier engines generated."""
    isolated: bool = False
    """Whether engines died of it: nothing else may run until its log has a new entry."""
    waited_s: float = 0.0
    """Seconds in its queue before this claim: since acceptance, or since it was requeued."""
    aged_classes: float = 0.0
    """Priority classes that it has risen by that: `waited_s` over settings.ageing_ms."""
    tenant_weight: int = 1
    """Its tenant's, see settings.tenant_weights."""

    @property
    def request_id(self) -> str:
        """The id in its spec."""
        return self.spec.request_id


@dataclass(slots=True)
class Append:
    """New entries of one request. One of kind END is the last one and finishes it.

    Not to be changed; a frozen one takes three times as long to make, and each token has one.
    """

    request_id: str
    epoch: int
    nonce: str
    first_index: int
    """Index of entries[0]."""
    entries: Sequence[EntryValues]
    """With their digests, see digests.chain."""
    previous_digest: str = ""
    """Digest of the log before entries[0], with which readers skip the check of each entry; "" for unknown."""
    cached_tokens: int | None = None
    """Prompt tokens from the prefix cache, once known: a cancel writes the usage from it."""

    @property
    def ends(self) -> bool:
        """Whether it finishes its request."""
        return bool(self.entries) and self.entries[-1][0] == END


class AppendKind(enum.IntEnum):
    """What became of an append. The numbers are append.lua's, except AWAY."""

    OK = 0
    """The log has the entries."""
    FENCED = 1
    """Another claim owns the request."""
    CONFLICT = 2
    """The log has other entries at these indices."""
    GAP = 3
    """Entries before these are missing: send again from next_index."""
    ENDED = 4
    """The request has finished otherwise."""
    MISSING = 5
    """Redis knows no such request."""
    AWAY = 6
    """The cluster's node that has the request did not answer. It may have the entries; a retry is harmless."""


@dataclass(frozen=True)
class AppendOutcome:
    """The outcome of one append.

    FENCED, CONFLICT, ENDED and MISSING: drop the work. GAP: send again from `next_index`. AWAY: send all again.
    """

    kind: AppendKind
    next_index: int
    """Entries in the log; 0 with MISSING and AWAY."""

    @property
    def lost(self) -> bool:
        """Whether the request is no longer this engine's."""
        return self.kind not in (AppendKind.OK, AppendKind.GAP, AppendKind.AWAY)
