"""A request inside the engine: its adapter, its choices, and what comes out of them.

With `sampling_params` and `plan` it is the ground of the engine: scheduler and cache stand on it beside the parts that
compute, and it imports none of them.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from hashlib import sha256
from typing import NamedTuple, Protocol

import msgspec

from pagestream_engine.errors import InvalidRequest
from pagestream_engine.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Choice:
    """One choice among several of one prompt, of a `Request`."""

    seq_id: str
    """The engine's id of it: unique among the unfinished ones; its outputs carry it."""
    params: SamplingParams
    """With `n` 1 and a seed of its own (see `SamplingParams.for_child`)."""
    output_token_ids: abc.Sequence[int] = ()
    """What an earlier run has generated: its next output is the token after them."""
    index: int | None = None
    """Its place among the choices of its request; None: its place among those that are given together."""


@dataclass(slots=True, eq=False)
class Request:
    """A prompt, what is wanted of it, and for whom: made where an engine accepts it, and carried to its last output.

    Its choices wait together and start together, as far as seats and blocks allow; those that do share the computation
    of the prompt: a leader computes it, the others follow. They are preempted and end one by one.
    """

    prompt_token_ids: abc.Sequence[int]
    """At least one token, at most `max_model_len - 1`."""
    choices: abc.Sequence[Choice]
    """Its choices. With `use_beam_search` they are the best hypotheses of one search, with `best_of` the likeliest of
    so many choices, by their places."""
    priority: int = 0
    """Its class, 0 first, for policies that look at it."""
    aged_classes: float = 0.0
    """Classes that it has risen by waiting elsewhere before: 1 for the age that one class is worth."""
    tenant: str = ""
    """Whose it is, for policies."""
    weight: float = 1.0
    """Its tenant's among the tenants."""
    cache_salt: bytes = b""
    """The prefix cache is shared only with requests of the same salt."""
    adapter: Adapter | None = None
    """The adapter that computes its tokens; the prefix cache is shared within its revision only."""
    prefix_key: bytes = field(init=False)
    """Salt and adapter in one: what must not share blocks although the tokens are equal."""
    sequences: list[Sequence] = field(init=False, repr=False, default_factory=list)
    """Its unfinished choices, in the order in which they were added. What ends leaves: a cycle would keep the tokens
    until the garbage collector comes."""
    waiting: list[Sequence] = field(init=False, repr=False, default_factory=list)
    """Those of them that wait."""
    was_admitted: bool = field(init=False, default=False)
    """Whether one of them has run: what the cache has of the prompt from then on is their own work."""
    num_passed: int = field(init=False, default=0)
    """Sequences that were admitted past it while it waited for room."""

    def __post_init__(self) -> None:
        self.prefix_key = salted(self.cache_salt, self.adapter)

    @property
    def is_search(self) -> bool:
        """Whether its choices are the beams of a search, which must not part: each step chooses among all."""
        return self.sequences[0].params.use_beam_search

    @property
    def has_running(self) -> bool:
        """Whether a choice is admitted."""
        return any(seq.state is SequenceState.RUNNING for seq in self.sequences)

    @property
    def is_computing_prompt_logprobs(self) -> bool:
        """Whether a choice that runs computes the log probabilities of the prompt, which are the others' too."""
        return any(seq.wants_prompt_logprobs and seq.state is SequenceState.RUNNING for seq in self.sequences)


_EXTRA = "~"


def with_extra_ids(choices: abc.Sequence[Choice], count: int) -> list[str]:
    """Return ids of `count` sequences: those of the choices, then others, which stand for the first one."""
    ids = [choice.seq_id for choice in choices]
    return ids + [f"{ids[0]}{_EXTRA}{place}" for place in range(len(ids), count)]


def choice_id(seq_id: str) -> str:
    """Return the id of the choice that a sequence is, or stands for."""
    return seq_id.partition(_EXTRA)[0]


def choice_indexes(choices: abc.Sequence[Choice]) -> list[int]:
    """Return the place of each choice among the choices of its request."""
    return [place if choice.index is None else choice.index for place, choice in enumerate(choices)]


class Detokenizer(Protocol):
    """Makes text of a sequence's tokens as they come; see `output.IncrementalDetokenizer`."""

    def push(self, token_id: int) -> str:
        """The text that is certain with this token."""
        ...

    def flush(self) -> str:
        """The rest, now that nothing follows."""
        ...


class StopMatcher(Protocol):
    """Finds stop strings in that text; see `output.StopStringMatcher`."""

    def push(self, text: str) -> tuple[str, str | None]:
        """What may be shown with the next piece, and the stop string that ended it."""
        ...

    def flush(self) -> str:
        """The text that was held back, now that nothing follows."""
        ...


NO_ROW = -1


class SequenceState(Enum):
    """Where a sequence stands. It holds blocks only while it runs, and a follower not even then, until its leader has
    computed the prompt."""

    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


class Sequence:
    """Tokens, block tables and progress of one choice.

    `token_ids[:num_computed_tokens]` have their keys and values in the cache: in KV group g token i is in block
    `block_tables[g][i // block_size]` at offset `i % block_size`, of the group's block size. Where a group has a
    window, blocks behind it are replaced by NO_BLOCK. `steps.py` shows how the counts move while steps are in
    flight.
    """

    __slots__ = (
        "arrival",
        "block_hashes",
        "block_tables",
        "detokenizer",
        "end_token_ids",
        "ends_with_prompt",
        "followers",
        "hidden_stops",
        "leader",
        "max_total_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_in_flight_tokens",
        "num_output_placeholders",
        "num_prompt_tokens",
        "num_published_blocks",
        "params",
        "prompt_rows",
        "request",
        "requested_total_tokens",
        "row",
        "seed",
        "seq_id",
        "state",
        "stop_matcher",
        "stop_token_ids",
        "token_ids",
        "wants_prompt_logprobs",
        "was_admitted",
    )

    def __init__(  # noqa: PLR0915 - its fields
        self,
        seq_id: str,
        prompt_token_ids: abc.Sequence[int],
        params: SamplingParams,
        *,
        seed: int,
        arrival: int,
        max_total_tokens: int,
        output_token_ids: abc.Sequence[int] = (),
        request: Request | None = None,
        end_token_ids: frozenset[int] = frozenset(),
        num_kv_groups: int = 1,
    ) -> None:
        self.request = Request(prompt_token_ids, ()) if request is None else request
        """What it is a choice of."""
        if request is None:
            self.request.sequences.append(self)
        self.seq_id = seq_id
        self.token_ids: list[int] = [*prompt_token_ids, *output_token_ids]
        self.num_prompt_tokens = len(prompt_token_ids)
        self.params = params
        self.seed = seed
        """Of its noise, 64 bits signed; never None."""
        self.arrival = arrival
        """Rises with each sequence and survives preemption."""
        self.requested_total_tokens = max_total_tokens
        """Of the prompt and the longest output that its parameters allow: there it ends with "length"."""
        self.max_total_tokens = max_total_tokens
        """Prompt and output together, to which it may run now: of a beam what its search allows (see `Searches`), else
        `requested_total_tokens`."""
        self.end_token_ids = end_token_ids
        """Tokens that end it: stop tokens, and the model's own unless ignored. Not to be chosen before min_tokens."""
        self.ends_with_prompt = params.max_tokens == 0
        """Whether it ends when its prompt is computed: what is sampled after it is dropped."""
        self.state = SequenceState.WAITING
        self.row = NO_ROW
        """Its place in the runner's persistent batch; NO_ROW before it is first scheduled, and when it stops."""
        self.was_admitted = False
        """Whether it has run before: its cached tokens are counted once."""
        self.wants_prompt_logprobs = params.prompt_logprobs is not None and self.num_prompt_tokens > 1
        """Whether its prompt is still to be computed for its log probabilities: no cached prefix will do."""
        self.num_computed_tokens = 0
        self.num_in_flight_tokens = 0
        """Most tokens after the computed ones that steps in flight compute; with drafts it may be fewer."""
        self.num_output_placeholders = 0
        """Most tokens after `token_ids` that steps in flight sample; with drafts it may be fewer."""
        self.num_cached_tokens = 0
        """Prompt tokens that the prefix cache had when it was first admitted."""
        self.block_tables: list[list[int]] = [[] for _ in range(num_kv_groups)]
        """One for each KV group; empty unless it runs."""
        self.block_hashes: list[bytes] = []
        """Chained hashes of its first full blocks, as far as they were needed."""
        self.num_published_blocks = 0
        """Leading blocks of the finest table that the prefix cache knows (or has another block for), in all groups."""
        self.leader: Sequence | None = None
        """The choice that computes the prompt for it too: it runs, and has no blocks until then."""
        self.followers: list[Sequence] = []
        """Those whose leader it is."""
        # What its text has come to: `output.begin_text` sets it, `output.take` moves it on.
        self.detokenizer: Detokenizer | None = None
        """None: it has no text."""
        self.stop_matcher: StopMatcher | None = None
        """None: it has no stop strings."""
        self.hidden_stops: Mapping[int, str] = {}
        """Stop strings that are special tokens which the text doesn't show, by their tokens."""
        self.stop_token_ids: frozenset[int] = frozenset()
        """End tokens that are named as the reason of an end."""
        self.prompt_rows: list[LogprobRow] = []
        """Of its prompt's tokens from the second on, as far as they are computed, until they are complete."""

    def __len__(self) -> int:
        """Tokens, those included that steps in flight sample."""
        return len(self.token_ids) + self.num_output_placeholders

    # What policies ask of its request.

    @property
    def priority(self) -> int:
        """Its class; 0 is the first."""
        return self.request.priority

    @property
    def aged_classes(self) -> float:
        """Classes that it has risen by waiting elsewhere before it was added."""
        return self.request.aged_classes

    @property
    def tenant(self) -> str:
        """Whose it is."""
        return self.request.tenant

    @property
    def weight(self) -> float:
        """Its tenant's."""
        return self.request.weight

    @property
    def adapter(self) -> Adapter | None:
        """The adapter that it is computed with."""
        return self.request.adapter

    @property
    def adapter_revision(self) -> str | None:
        """Its adapter's; None without one."""
        adapter = self.request.adapter
        return None if adapter is None else adapter.revision

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated, those of a resumed request included, without placeholders."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_sent_tokens(self) -> int:
        """Tokens that are computed, or that steps in flight compute: the next step computes from here.

        It is what vLLM's `num_computed_tokens` counts, which rises when a step is scheduled; ours rises when its result
        has come.
        """
        return self.num_computed_tokens + self.num_in_flight_tokens

    @property
    def num_unsent_tokens(self) -> int:
        """Tokens that are neither computed nor in flight; the last of them may be a placeholder."""
        return len(self) - self.num_sent_tokens

    def forget_unsettled(self) -> None:
        """Drop what was sampled for a beam and not chosen yet: its search allows it one token at a time."""
        if self.params.use_beam_search:
            del self.token_ids[self.max_total_tokens - 1 :]

    def __repr__(self) -> str:
        done, total = self.num_computed_tokens, len(self.token_ids)
        return f"Sequence({self.seq_id!r}, {self.state.name.lower()}, {done}/{total} tokens computed)"


class TokenLogprob(NamedTuple):
    """How likely a token was, by the model's own logits."""

    token_id: int
    logprob: float
    """Natural logarithm of its probability."""
    rank: int
    """Its place among all tokens, from 1; of equally likely ones the lowest id comes first."""
    text: str
    """The token alone, special ones shown; U+FFFD for bytes that are no character."""


class SequenceOutput(msgspec.Struct, array_like=True, omit_defaults=True):
    """What one step did for one sequence.

    A finishing output carries the last token too. A sequence that failed may finish without a token.
    """

    seq_id: str
    """The engine's id of the sequence: what its `Choice` was given."""
    token_id: int | None
    text: str
    """The new text, a pure function of the tokens. Empty while a character or a stop string may be incomplete."""
    finish_reason: str | None = None
    """stop, length or error; None while it goes on."""
    stop_reason: int | str | None = None
    """The stop token or stop string; None for the model's own end-of-sequence token."""
    num_cached_tokens: int = 0
    """Prompt tokens that the prefix cache had."""
    error: str | None = None
    """Why it failed."""
    is_request_fault: bool = False
    """Whether its request is at fault (see `RequestFault`): another engine would fail it as well."""
    logprobs: tuple[TokenLogprob, ...] | None = None
    """The token itself, then the likeliest ones; None where they were not asked for."""
    prompt_logprobs: tuple[tuple[TokenLogprob, ...], ...] | None = None
    """Of an output without a token, before those of the first tokens: for each token of the prompt from the second on,
    as `logprobs`. A group has one such output, of the choice that computed the prompt."""
    pooled: bytes | None = None
    """Of the output with which a request with `pooling` ends: the hidden states pooled from its prompt, after the
    model's last norm, as float32 numbers in little-endian order. See `models.pooling.vector_of`."""
    cumulative_logprob: float | None = None
    """Of a finishing output of a beam search: the sum over its tokens."""


class LogprobRow(NamedTuple):
    """The chosen token, then the likeliest ones, without their texts."""

    token_ids: list[int]
    logprobs: list[float]
    rank: int
    """The chosen token's; the others follow in order from 1."""


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """An adapter as vLLM's `LLM.generate` takes it; `lora_int_id` means nothing here."""

    lora_name: str
    lora_int_id: int
    lora_path: str

    def __post_init__(self) -> None:
        if not isinstance(self.lora_name, str) or not self.lora_name or not isinstance(self.lora_path, str):
            raise InvalidRequest(
                f"lora_request: given name {self.lora_name!r} and path {self.lora_path!r}, expected two strings"
            )


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter by its files, which are checked against the revision when they are read."""

    name: str
    """The name that requests give."""
    folder: str
    """Where `adapter_config.json` and `adapter_model.safetensors` are."""
    revision: str
    """32 hexadecimal digits of a SHA-256 of both files: other weights are another adapter."""


def salted(cache_salt: bytes, adapter: Adapter | None) -> bytes:
    """Return the extra key of a prefix cache for a caller's salt and an adapter's revision; without one, the salt."""
    if adapter is None:
        return cache_salt
    return sha256(b"adapter\0" + adapter.revision.encode() + b"\0" + cache_salt, usedforsecurity=False).digest()
