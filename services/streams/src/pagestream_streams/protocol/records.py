"""What is stored of a request and its log, and the records that this package exchanges with its callers.

A log entry has three forms: the record (`LogEntry`), append.lua's values, and the fields of a Redis stream entry. Each
has a rolling digest of the log up to it: equal digests mean equal tokens, choices and finish reasons. Of what was
computed of a prompt it has how far that goes, not its numbers: as log probabilities of tokens, they differ in their
last bits between engines that are not deterministic. It is SHA-1 because Redis' Lua has it and the scripts that end a
request extend the chain themselves; it guards against mix-ups, not against forgers.

The name of a finish reason is the enum value's without its prefix, in lower case: FINISH_REASON_STOP is "stop". Lua
scripts write names too, so they are part of the stored form.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha1, sha256
from typing import cast

import orjson
from pagestream.v1.inference_pb2 import FinishReason, RequestError, RequestState, SamplingParams, TokenLogprobs, Usage
from pagestream.v1.records_pb2 import ChoiceFinish, LogEnd, LogEntry, PromptPart, RequestSpec


@dataclass
class ClaimedLog:
    """The tokens and finishes of each choice, and how far the parts of prompts go.

    Texts, logprobs and the parts are left out: a token takes four bytes.
    """

    tokens: dict[int, array[int]] = field(default_factory=dict)
    """Token ids by choice."""
    finishes: dict[int, FinishReason] = field(default_factory=dict)
    """By choice, of those that have finished."""
    prompt_ends: dict[int, int] = field(default_factory=dict)
    """By first choice of a prompt, how far its parts go (see PromptPart.end)."""

    @classmethod
    def of(cls, entries: Iterable[LogEntry]) -> ClaimedLog:
        """Return the log with these entries."""
        log = cls()
        for entry in entries:
            if entry.HasField("token_id"):
                log._add_token(entry.choice, entry.token_id)
            elif entry.HasField("finish"):
                log.finishes[entry.choice] = entry.finish.reason
            elif entry.HasField("prompt_part"):
                log.prompt_ends[entry.choice] = entry.prompt_part.end
        return log

    @property
    def num_tokens(self) -> int:
        """Tokens of all choices."""
        return sum(map(len, self.tokens.values()))

    def add(self, fields: Mapping[bytes, bytes]) -> None:
        """Add a Redis stream entry. KeyError, ValueError or OverflowError where it can't be read."""
        token = fields.get(b"t")
        if token is not None:
            self._add_token(int(fields[b"c"]), int(token))
        elif b"p" in fields:
            self.prompt_ends[int(fields[b"c"])] = int(fields[b"p"])
        elif b"end" not in fields:
            self.finishes[int(fields[b"c"])] = parse_finish_reason(fields[b"f"].decode())

    def _add_token(self, choice: int, token_id: int) -> None:
        tokens = self.tokens.get(choice)
        if tokens is None:
            tokens = self.tokens[choice] = array("I")
        tokens.append(token_id)


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
    """A request that was quarantined because engines died of it (docs/design/fencing.md)."""

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


_HEAD, _WIDTH = 7, 6
"""Values of a request before its entries, and of an entry: append.lua's."""


@dataclass(frozen=True, slots=True)
class TokenAppends:
    """One append for each of `count` requests: tokens without logprobs that follow others of the same claim."""

    partition: int
    """Number of their partition, which their request ids name."""
    count: int
    values: bytes
    """append.lua's array of the partition."""
    ends: Sequence[int]
    """Each log's next index after its entries."""
    wake_ups: bytes
    """For each append a WakeUp of its slice, one after another."""
    wake_ends: Sequence[int]
    """Where each one ends in `wake_ups`."""

    def wake_up(self, place: int) -> bytes:
        """Return the WakeUp of an append. Concatenated ones are one with all slices."""
        return self.wake_ups[self.wake_ends[place - 1] if place else 0 : self.wake_ends[place]]

    def appends(self) -> list[Append]:
        """Return the appends as records, which cost more than all the rest."""
        values, at, appends = orjson.loads(self.values), 0, []
        while at < len(values):
            request_id, epoch, nonce, first_index, _, count, _ = values[at : at + _HEAD]
            at += _HEAD
            entries = [tuple(values[place : place + _WIDTH]) for place in range(at, at + count * _WIDTH, _WIDTH)]
            at += count * _WIDTH
            appends.append(Append(request_id, int(epoch), nonce, first_index, entries))
        return appends


@dataclass(frozen=True, slots=True)
class TokenOutcomes:
    """What became of `TokenAppends`."""

    next_indexes: Sequence[int]
    """Entries in each log, but for `others`."""
    others: Mapping[int, tuple[Append, AppendOutcome]]
    """By place, the appends whose outcome is not OK, or whose log was longer already, with the outcome."""


Argument = bytes | str | int

EntryValues = tuple[str, str, str, str, str, str | bytes]
"""append.lua's six values for an entry: kind, choice, value, text, digest, extra.

TOKEN: the value is the token id, extra its logprobs (a TokenLogprobs, serialised; "" for none). FINISH: the value is
the reason, extra the stop reason. END: the second of the end in place of a choice ("": unknown), the value is the
reason, the text the usage, extra the error. PART: the value is the part's `end`, extra the part without it (a
PromptPart, serialised). An engine makes one for each token: a plain tuple, since a message costs three times as much.
"""

TOKEN, FINISH, END, PART = "t", "f", "e", "p"
"""Kinds of entries."""

INVALID_REQUEST = "invalid_request"
"""Code of an error for which the request itself is at fault: the same request fails again on any engine."""

_ERROR_SEPARATOR = "\0"


def to_entry_values(entry: LogEntry) -> EntryValues:
    """Return the values of an entry. ValueError for one without a body."""
    if entry.HasField("token_id"):
        extra = entry.logprobs.SerializeToString() if entry.HasField("logprobs") else ""
        return TOKEN, str(entry.choice), str(entry.token_id), entry.text, entry.digest, extra
    if entry.HasField("finish"):
        reason = finish_reason_name(entry.finish.reason)
        return FINISH, str(entry.choice), reason, entry.text, entry.digest, entry.finish.stop_reason
    if entry.HasField("end"):
        reason, usage = finish_reason_name(entry.end.reason), usage_text(entry.end.usage)
        error = error_text(entry.end.error) if entry.end.HasField("error") else ""
        return END, str(entry.end.ended_at or ""), reason, usage, entry.digest, error
    if entry.HasField("prompt_part"):
        part = PromptPart(logprobs=entry.prompt_part.logprobs, embedding=entry.prompt_part.embedding)
        return PART, str(entry.choice), str(entry.prompt_part.end), "", entry.digest, part.SerializeToString()
    raise ValueError("expected a log entry with a token, a finish, a prompt part or the end; this one has no body")


def to_log_entry(values: EntryValues) -> LogEntry:
    """Return the entry of values that `to_entry_values` or an engine made."""
    kind, choice, value, text, digest, extra = values
    if kind == TOKEN:
        entry = LogEntry(choice=int(choice), digest=digest, text=text, token_id=int(value))
        if isinstance(extra, bytes):
            entry.logprobs.MergeFromString(extra)
        return entry
    if kind == PART:
        return LogEntry(choice=int(choice), digest=digest, prompt_part=_part(value, extra))
    said = extra if isinstance(extra, str) else extra.decode()
    if kind == FINISH:
        finish = ChoiceFinish(reason=parse_finish_reason(value), stop_reason=said)
        return LogEntry(choice=int(choice), digest=digest, text=text, finish=finish)
    return LogEntry(digest=digest, end=_end(value, text, said, choice))


def from_stream_fields(fields: Mapping[bytes, bytes]) -> LogEntry:
    """Return the entry of a Redis stream entry. KeyError, ValueError or DecodeError where it can't be read."""
    digest = fields[b"d"].decode()
    token = fields.get(b"t")
    if token is not None:
        entry = LogEntry(choice=int(fields[b"c"]), digest=digest, text=fields[b"x"].decode(), token_id=int(token))
        logprobs = fields.get(b"l")
        if logprobs is not None:
            entry.logprobs.CopyFrom(TokenLogprobs.FromString(logprobs))
        return entry
    text = fields.get(b"x", b"").decode()
    if b"f" in fields:
        finish = ChoiceFinish(
            reason=parse_finish_reason(fields[b"f"].decode()), stop_reason=fields.get(b"s", b"").decode()
        )
        return LogEntry(choice=int(fields[b"c"]), digest=digest, text=text, finish=finish)
    if b"p" in fields:
        part = _part(fields[b"p"].decode(), fields[b"l"])
        return LogEntry(choice=int(fields[b"c"]), digest=digest, prompt_part=part)
    error = fields.get(b"m", b"").decode()
    ended_at = fields.get(b"a", b"").decode()
    return LogEntry(digest=digest, end=_end(fields[b"end"].decode(), fields[b"u"].decode(), error, ended_at))


_USAGE = tuple(field.name for field in Usage.DESCRIPTOR.fields)


def usage_text(usage: Usage) -> str:
    """Return the stored form of an end's usage."""
    return ",".join(str(getattr(usage, name)) for name in _USAGE)


def error_text(error: RequestError) -> str:
    """Return the stored form of an end's error."""
    return f"{error.code}{_ERROR_SEPARATOR}{error.message}"


def _part(end: str, stored: str | bytes) -> PromptPart:
    part = PromptPart.FromString(stored if isinstance(stored, bytes) else stored.encode())
    part.end = int(end)
    return part


def _end(reason: str, usage: str, error: str, ended_at: str) -> LogEnd:
    # Releases write as many counts as they know: what is missing is 0, what is unknown is left out.
    counts = Usage(**dict(zip(_USAGE, map(int, usage.split(",")), strict=False)))
    failed = _error(error) if error else None
    return LogEnd(reason=parse_finish_reason(reason), usage=counts, error=failed, ended_at=int(ended_at or 0))


def _error(stored: str) -> RequestError:
    code, _, message = stored.partition(_ERROR_SEPARATOR)
    return RequestError(code=code, message=message)


DIGEST_CHARS = 16


def chain(previous: str, entry: LogEntry) -> str:
    """Return the digest of a log with digest `previous` ("" at its start) after `entry`, as 16 hexadecimal digits."""
    choice = str(entry.choice)
    match entry.WhichOneof("body"):
        case "token_id":
            return chain_values(previous, TOKEN, choice, str(entry.token_id))
        case "finish":
            return chain_values(previous, FINISH, choice, finish_reason_name(entry.finish.reason))
        case "prompt_part":
            return chain_values(previous, PART, choice, str(entry.prompt_part.end))
        case "end":
            return chain_values(previous, END, "", finish_reason_name(entry.end.reason))
        case _:
            raise ValueError(
                "expected a log entry with a token, a finish, a prompt part or the end; this one has no body"
            )


def chain_values(previous: str, kind: str, choice: str, value: str) -> str:
    """Return the digest after an entry with these values (see EntryValues)."""
    body = f"end:{value}" if kind == END else f"c:{choice}:{kind}:{value}"
    return sha1(f"{previous}:{body}".encode(), usedforsecurity=False).hexdigest()[:DIGEST_CHARS]


def chained(previous: str, entries: Iterable[LogEntry]) -> list[LogEntry]:
    """Set the digests of consecutive entries in place, and return the entries."""
    result = []
    for entry in entries:
        previous = entry.digest = chain(previous, entry)
        result.append(entry)
    return result


_PREFIX = "FINISH_REASON_"

FINISH_REASONS: dict[str, FinishReason] = {
    name.removeprefix(_PREFIX).lower(): cast("FinishReason", value) for name, value in FinishReason.items() if value
}
"""Every reason by its name, without UNSPECIFIED."""

_NAMES = {reason: name for name, reason in FINISH_REASONS.items()}


def finish_reason_name(reason: FinishReason) -> str:
    """Return the name of a reason. ValueError for UNSPECIFIED and for values that the enum does not have."""
    name = _NAMES.get(reason)
    if name is None:
        raise ValueError(f"finish reason {reason} has no name: expected one of {', '.join(FINISH_REASONS)}")
    return name


def parse_finish_reason(name: str) -> FinishReason:
    """Return the reason of a name; UNSPECIFIED for "". ValueError for a name that no reason has."""
    if not name:
        return FinishReason.FINISH_REASON_UNSPECIFIED
    reason = FINISH_REASONS.get(name)
    if reason is None:
        raise ValueError(f"unknown finish reason {name!r}: expected one of {', '.join(FINISH_REASONS)}")
    return reason


POISON_S = 600
"""For so long requests are refused that equal one which engines died of."""

_OF_ONE_CALL = (
    "request_id",
    "client_request_id",
    "traceparent",
    "tracestate",
    "idempotency_key",
    "deadline_ms",
    "on_disconnect",
    "disconnect_grace_ms",
    "answer",
    "priority",
    "credential",
)


def equality_digest(spec: RequestSpec) -> bytes:
    """Return a digest of a request without what each call has of its own: ids, its seed, deadline and priority.

    Tenants count: nobody can have the requests of another refused.
    """
    same = RequestSpec()
    same.CopyFrom(spec)
    for each in _OF_ONE_CALL:
        same.ClearField(each)
    same.sampling.ClearField("seed")
    return sha256(same.SerializeToString(deterministic=True)).digest()
