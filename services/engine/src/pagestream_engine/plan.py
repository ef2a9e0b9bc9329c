"""What the core and an executor say to each other: plan and result of a step, and what is prepared beside them.

Records are immutable and hold plain numbers, tuples and numpy arrays, which `wire` carries to other processes.
They name a running sequence by its row: a place in the runner's persistent batch, below `max_num_seqs`. A sequence is
sent once, as a `NewSequence`; each later plan has only what changed.

Then two records of the core alone, `ScheduledSequence` and `ScheduledStep`: what the scheduler chose, of which
`PlanBuilder` makes the plan. Last stands `KVLayout`: what a KV cache keeps of each token, by KV group, that is, layers
whose caches have one shape, with a block table of their own over one pool of equal pages.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from pagestream_grammars import Grammar

from pagestream_engine.errors import RequestFault, UnsupportedModel
from pagestream_engine.request import Adapter, Sequence
from pagestream_engine.sampling_params import SamplingParams

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
Float32Array = npt.NDArray[np.float32]


def no_copies() -> Int32Array:
    """Return (0, 2)."""
    return np.empty((0, 2), np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class NewSequence:
    """A sequence that enters the persistent batch, or enters it anew after it was preempted."""

    row: int
    """Its place in the persistent batch until a plan removes it."""
    token_ids: Int32Array
    """(tokens,): prompt, then the output so far. The tokens after these are sampled by the runner."""
    num_prompt_tokens: int
    """Leading tokens that are the prompt."""
    num_computed_tokens: int
    """Leading tokens that this row does not compute: its next step computes from here. Their keys and values are in its
    blocks, but for a sibling that enters to sample from its leader's logits: the leader computes them in this step."""
    params: SamplingParams
    seed: int
    """Of its noise, 64 bits signed."""
    end_token_ids: tuple[int, ...]
    """Tokens that end it, which may not be sampled before `params.min_tokens`."""
    block_tables: tuple[Int32Array, ...]
    """For each KV group, (blocks,): its first blocks; all that its first chunk needs. A sibling that samples from its
    leader's logits has none yet: they come with a later plan. A place that lies behind the group's window is 0 and must
    not be read."""
    num_prompt_logprobs: int | None = None
    """How many of the likeliest tokens are wanted in the place of each prompt token but the first, beside its own log
    probability; -1: all. None: no log probabilities of the prompt."""
    adapter: Adapter | None = None
    """The adapter that its tokens are computed with."""


@dataclass(frozen=True, slots=True, eq=False)
class BlockEdits:
    """What changed in one KV group's block tables: `table[rows[i], places[i]] = blocks[i]` for each i."""

    rows: Int32Array
    """(edits,)"""
    places: Int32Array
    """(edits,): index within the row's table."""
    blocks: Int32Array
    """(edits,)"""


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """One step for the runner: edits of the persistent batch, in the order of the fields, then what to compute.

    It names no positions: core and runner count each row's tokens by themselves, and agree since each sees the same
    plans and results in the same order. Whatever breaks that order (a failed step, another executor) ends in `reset`.
    """

    step_id: int
    """Rises by one with each plan of an engine."""
    reset: bool
    """Whether the runner first forgets all rows: the first plan after a failed step, and of a new executor."""
    removed: Int32Array
    """(removed,): rows that are free from now on."""
    added: tuple[NewSequence, ...]
    appended: tuple[BlockEdits, ...]
    """For each KV group."""
    copies: Int32Array
    """(copies, 2): source and target blocks, whose pages are copied whole, in every layer slot, whichever KV group has
    them (see `KVLayout`). All sources are read before a target is written, and
    all are copied before anything is computed."""
    rows: Int32Array
    """(scheduled,): rows that compute, prefill chunks first, then decodes. Row r computes its next tokens, from the
    first one that no plan before this had computed."""
    num_new_tokens: Int32Array
    """(scheduled,): tokens that each computes, at least 1. A decode computes its last token, then drafts of the tokens
    after it."""
    num_prefills: int
    """Leading entries of `rows` that are prefill chunks."""
    sampled_rows: Int32Array
    """(samples,): rows that get a token, in the order of the result."""
    sampled_from: Int32Array
    """(samples,): index into `rows` whose last new token's logits each samples from: its own entry, or its leader's
    for the siblings of a prompt, each of which has noise of its own."""
    saves: Int32Array = field(default_factory=no_copies)
    """(saves, 2): blocks, and the host pages that they are copied to, whole as in `copies`. The copies are made beside
    the computation, which does not write these blocks, after those of the plans before, and are done before the next
    plan computes."""
    loads: Int32Array = field(default_factory=no_copies)
    """(loads, 2): blocks, and the host pages that are copied to them, likewise, after the saves. The computation
    neither reads nor writes these blocks. A plan with loads may have no `rows`."""

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return sum(self.num_new_tokens.tolist())


@dataclass(frozen=True, slots=True, eq=False)
class StepLogprobs:
    """Log probabilities of the samples that asked for them, by the model's own logits."""

    samples: Int32Array
    """(reported,): index into the step's samples, ascending. A sample with several tokens has an entry for each, in
    their order."""
    counts: Int32Array
    """(reported,): how many of the likeliest tokens each asked for."""
    token_ids: Int32Array
    """(reported, 1 + most): the chosen token, then the likeliest ones in order. Entries past `1 + count` mean
    nothing."""
    logprobs: Float32Array
    """(reported, 1 + most): natural logarithms of their probabilities."""
    ranks: Int32Array
    """(reported,): the chosen token's place among all tokens, from 1; of equally likely ones the lowest id is first."""


@dataclass(frozen=True, slots=True, eq=False)
class StepPromptLogprobs:
    """Log probabilities of prompt tokens, by the logits of the tokens before them, which the step has computed."""

    scheduled: Int32Array
    """(chunks,): index into `StepPlan.rows`."""
    positions: Int32Array
    """(chunks,): place in the prompt of the first token that each chunk reports."""
    num_tokens: Int32Array
    """(chunks,): tokens that each reports; their rows follow one another."""
    counts: Int32Array
    """(chunks,): how many of the likeliest tokens each asked for."""
    token_ids: Int32Array
    """(tokens, 1 + most): as `StepLogprobs.token_ids`, with the prompt's token as the chosen one."""
    logprobs: Float32Array
    """(tokens, 1 + most)"""
    ranks: Int32Array
    """(tokens,)"""


@dataclass(frozen=True, slots=True, eq=False)
class StepPooled:
    """Hidden states pooled from the prompts that a step has ended."""

    samples: Int32Array
    """(prompts,): index into the step's samples."""
    states: Float32Array
    """(prompts, hidden_size): after the model's last norm."""

    def by_sample(self) -> dict[int, Float32Array]:
        """The (hidden_size,) states of each prompt, by its sample."""
        return dict(zip(self.samples.tolist(), self.states, strict=True))


@dataclass(frozen=True, slots=True, eq=False)
class StepResult:
    """What a step gave: 0 to k tokens for each of its samples.

    A sample of a prefill chunk has one token, or none where a grammar's mask is not there. A decode's has at most as
    many as it computes: the drafts that hold, and the token after them. With none a row computes its last token again.
    So the last token of a row that has sampled is always the only one that is not computed.
    """

    step_id: int
    """The plan's."""
    token_ids: Int32Array
    """(samples, k), in the order of `StepPlan.sampled_rows`; row i has `counts[i]` tokens, then padding."""
    counts: Int32Array
    """(samples,)"""
    logprobs: StepLogprobs | None = None
    """None where no sample asked for any."""
    errors: Mapping[int, str] = field(default_factory=dict)
    """Why a sample failed, by index into the samples: its sequence ends after the tokens that it has, the others go
    on."""
    prompt_logprobs: StepPromptLogprobs | None = None
    """None where no row that computed tokens of its prompt asked for any."""
    pooled: StepPooled | None = None
    """None where no prompt that is pooled has ended."""
    num_drafts: Int32Array | None = None
    """(samples,): drafts that each has computed; None in a step without any."""
    faults: abc.Sequence[int] = ()
    """Those of the errors that are a `RequestFault`: set from them, and they from it in another process."""
    has_one_each: bool = field(init=False)
    """Whether each sample has exactly one token, and none failed."""

    def __post_init__(self) -> None:
        are_one = self.token_ids.shape[1] == 1 and self.counts.tolist().count(1) == len(self.counts)
        object.__setattr__(self, "has_one_each", are_one and not self.errors)
        if self.errors:
            self._note_faults()

    def _note_faults(self) -> None:
        errors = {place: RequestFault(text) if place in self.faults else text for place, text in self.errors.items()}
        object.__setattr__(self, "errors", errors)
        object.__setattr__(self, "faults", [at for at, text in errors.items() if isinstance(text, RequestFault)])

    def tokens(self) -> abc.Sequence[abc.Sequence[int]]:
        """The tokens of each sample; of one that failed those before."""
        if self.has_one_each:
            return list(zip(self.token_ids[:, 0].tolist(), strict=True))
        counts = self.counts.tolist()
        return [token_ids[:count] for token_ids, count in zip(self.token_ids.tolist(), counts, strict=True)]


PendingResult = Callable[[], StepResult]
"""Waits for a launched step, and returns its result or raises what failed it. It may be called once."""


def raising(error: BaseException) -> PendingResult:
    """Return a pending result that raises."""

    def result() -> StepResult:
        raise error

    return result


class AdapterLoad(NamedTuple):
    """An adapter that an executor is to read, beside its steps."""

    adapter: Adapter
    evicted: str | None
    """Revision that it forgets first."""


class LoadedAdapter(NamedTuple):
    """An adapter that was read, or could not be."""

    revision: str
    error: str | None


class PreparedGrammar(NamedTuple):
    """A grammar that was compiled, or could not be."""

    grammar: Grammar
    error: RequestFault | None


class BlockCopy(NamedTuple):
    """A block whose page becomes that of another, whole and in every layer slot, whichever KV group holds it."""

    source: int
    target: int


class PageCopy(NamedTuple):
    """A block's keys and values, whole and in every layer slot, to a host page or from it."""

    block: int
    page: int


@dataclass(slots=True)
class ScheduledSequence:
    """One sequence's part of a step: the next `num_scheduled_tokens` of its unsent tokens.

    Its block tables cover these tokens.
    """

    seq: Sequence
    num_scheduled_tokens: int
    """Tokens that this step computes. Of a decode: its last token, then drafts of those after it."""
    needs_sample: bool
    """Whether these tokens reach the end of `token_ids`, so that the next token can be sampled."""
    siblings: abc.Sequence[Sequence] = ()
    """Sequences with equal tokens, which sample from the same logits, each with noise of its own."""


@dataclass(slots=True)
class ScheduledStep:
    """One step."""

    prefills: list[ScheduledSequence] = field(default_factory=list)
    """Chunks of prompts and of recomputed sequences."""
    decodes: list[ScheduledSequence] = field(default_factory=list)
    """One new token each, and drafts; all need a sample."""
    has_drafts: bool = False
    """Whether some decode computes drafts."""
    copies: list[BlockCopy] = field(default_factory=list)
    """Done before anything is computed, all sources being read before any target is written."""

    saves: list[PageCopy] = field(default_factory=list)
    """Blocks that are copied to host memory beside the computation, which does not write them."""
    loads: list[PageCopy] = field(default_factory=list)
    """Blocks that are copied from host memory beside the computation, which does not read them."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to run."""
        return not self.prefills and not self.decodes and not self.loads

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        num_decoded = (
            sum(entry.num_scheduled_tokens for entry in self.decodes) if self.has_drafts else len(self.decodes)
        )
        return num_decoded + sum(chunk.num_scheduled_tokens for chunk in self.prefills)

    def sampled(self) -> list[Sequence]:
        """The sequences that get a token, in the order of the runner's answer: prefills, then decodes."""
        first = [seq for chunk in self.prefills if chunk.needs_sample for seq in (chunk.seq, *chunk.siblings)]
        return first + [entry.seq for entry in self.decodes]


NO_BLOCK = -1
"""In a block table: a place whose tokens attention no longer reads, and which holds no block."""
TO_LOAD = -2
"""In the table of a cached prefix: a place whose block is in host memory, and gets a block of the pool."""
MAX_PADDING = 0.05
"""Share of a long sequence's memory that padding may take to have fewer groups: each is a table to keep."""


@dataclass(frozen=True, slots=True)
class KVSpec:
    """What one layer keeps of each token: a key and a value of `num_kv_heads` heads."""

    num_kv_heads: int
    head_dim: int
    window: int | None = None
    """Tokens that a query attends to, its own included; None is all that came before."""

    @property
    def elements_per_token(self) -> int:
        """Of a key, and as many of a value."""
        return self.num_kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers of one shape that share block tables: block b of the group holds the same tokens in each of its layers.

    What a kind of attention keeps of a sequence is one number, `first_block`: 0 for full attention, the block in which
    the window begins for a sliding one.
    """

    layers: tuple[int, ...]
    """Indices in the model. The i-th is stored in layer slot i, which it shares with the i-th layer of other groups."""
    spec: KVSpec
    block_size: int
    """Tokens a block."""

    def num_blocks_for(self, num_tokens: int) -> int:
        """Places of a table that covers this many tokens, those behind the window included."""
        return -(-num_tokens // self.block_size)

    def first_block(self, num_computed_tokens: int) -> int:
        """The first place of a table that attention reads from when so many tokens are computed."""
        if self.spec.window is None:
            return 0
        return max(0, num_computed_tokens - self.spec.window + 1) // self.block_size

    def max_blocks_held(self, num_tokens: int, chunk: int) -> int:
        """Most blocks that a sequence of this many tokens holds at once if no step computes more than `chunk` of them:
        `chunk` queries attend to `window + chunk - 1` tokens, which lie anywhere between block borders."""
        if self.spec.window is None:
            return self.num_blocks_for(num_tokens)
        span = self.spec.window + max(1, chunk) - 1
        return min(self.num_blocks_for(num_tokens), self.num_blocks_for(span - 1) + 1)


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The groups of a model, whose blocks have equal pages: `block_size * spec.elements_per_token` is the same in all.

    Each layer slot has storage for one page a block. A block id belongs to one group at a time, and is a page of that
    id in every slot, which the slot's layer of that group views in its own shape.
    """

    groups: tuple[KVGroup, ...]
    num_slots: int
    """Layers of the largest group."""
    separates_outputs: bool = False
    """Whether a sequence's outputs have other bits in their keys and values than the same tokens in a prompt, so that
    blocks of the one kind must not be found in the place of the other."""

    @property
    def block_size(self) -> int:
        """Tokens of the smallest block. Those of other groups are this times a power of two."""
        return min(group.block_size for group in self.groups)

    @property
    def finest_group(self) -> int:
        """Index of the first group with the smallest blocks: where no block of its ends, none of another's does."""
        return [group.block_size for group in self.groups].index(self.block_size)

    @property
    def padding(self) -> float:
        """Share of all groups' layer slots that have no layer."""
        return 1.0 - sum(len(group.layers) for group in self.groups) / (len(self.groups) * self.num_slots)

    def num_blocks_for(self, num_tokens: int, chunk: int = 1) -> int:
        """Most blocks that a sequence of this many tokens holds at once, in all groups: see `KVGroup`."""
        return sum(group.max_blocks_held(num_tokens, chunk) for group in self.groups)

    def max_tokens(self, num_blocks: int, limit: int) -> int:
        """Tokens of the longest sequence that a pool of `num_blocks` can hold alone, at most `limit`."""
        fits, too_long = 0, limit + 1
        while too_long - fits > 1:
            middle = (fits + too_long) // 2
            if self.num_blocks_for(middle) <= num_blocks:
                fits = middle
            else:
                too_long = middle
        return fits


def make_layout(
    specs: abc.Sequence[KVSpec], block_size: int, max_model_len: int, stages: abc.Sequence[range] = ()
) -> KVLayout:
    """Divide a model's layers into groups.

    Layers of one shape are divided into as many groups as it takes so that no group has more than `num_slots` layers.
    `num_slots` is the largest number that costs a sequence of `max_model_len` tokens at most MAX_PADDING more memory
    than groups of one layer would. Where a token of one shape takes half or a quarter of one of another, its blocks
    hold two or four times as many tokens.

    Args:
        specs: what each layer keeps.
        block_size: tokens of a block of the layers that keep most.
        max_model_len: tokens of the longest sequence. A window that is not shorter is full attention.
        stages: layers that different devices have, which each keep the pages of their own: every group gets about as
            many layers of each.

    Raises:
        UnsupportedModel: the sizes of two shapes are not in a ratio of a power of two.
    """
    kinds: dict[KVSpec, list[int]] = {}
    for layer, spec in enumerate(specs):
        kinds.setdefault(_without_wide_window(spec, max_model_len), []).append(layer)
    largest = max(kinds, key=lambda spec: spec.elements_per_token)
    whole = [
        KVGroup(_dealt(layers, stages), spec, block_size * _tokens_for_one(largest, spec))
        for spec, layers in kinds.items()
    ]
    num_slots = _choose_num_slots(whole, max_model_len)
    groups = [part for group in whole for part in _split(group, num_slots)]
    return KVLayout(tuple(groups), max(len(group.layers) for group in groups))


def _dealt(layers: list[int], stages: abc.Sequence[range]) -> tuple[int, ...]:
    """Order layers so that those of each stage are spread evenly."""
    places = {layer: (place + 0.5) / len(own) for own in _own_layers(layers, stages) for place, layer in enumerate(own)}
    return tuple(sorted(layers, key=lambda layer: (places[layer], layer))) if stages else tuple(layers)


def _own_layers(layers: list[int], stages: abc.Sequence[range]) -> list[list[int]]:
    return [[layer for layer in layers if layer in stage] for stage in stages]


def full_attention(block_size: int, num_layers: int = 1, spec: KVSpec | None = None) -> KVLayout:
    """The layout of a model all of whose layers are alike, and attend to everything."""
    spec = KVSpec(1, 1) if spec is None else spec
    group = KVGroup(tuple(range(num_layers)), spec, block_size)
    return KVLayout((group,), num_layers)


def _without_wide_window(spec: KVSpec, max_model_len: int) -> KVSpec:
    is_wide = spec.window is not None and spec.window >= max_model_len
    return replace(spec, window=None) if is_wide else spec


def _tokens_for_one(largest: KVSpec, spec: KVSpec) -> int:
    """How many tokens of one shape take what one of the largest takes."""
    ratio, rest = divmod(largest.elements_per_token, spec.elements_per_token)
    if rest or ratio & (ratio - 1):
        raise UnsupportedModel(
            f"layers: given caches of {largest.num_kv_heads} heads of {largest.head_dim} and of {spec.num_kv_heads} of "
            f"{spec.head_dim}, expected a ratio of 1, 2, 4, ... between their sizes"
        )
    return ratio


def _choose_num_slots(whole: list[KVGroup], max_model_len: int) -> int:
    blocks = {group: group.max_blocks_held(max_model_len, 1) for group in whole}
    most = max(len(group.layers) for group in whole)
    unpadded = sum(len(group.layers) * held for group, held in blocks.items())

    def cost(num_slots: int) -> int:
        return sum(num_slots * -(-len(group.layers) // num_slots) * held for group, held in blocks.items())

    return max(slots for slots in range(1, most + 1) if cost(slots) <= (1 + MAX_PADDING) * unpadded)


def _split(group: KVGroup, num_slots: int) -> list[KVGroup]:
    """Parts of at most `num_slots` layers each."""
    layers = group.layers
    return [replace(group, layers=layers[start : start + num_slots]) for start in range(0, len(layers), num_slots)]


class HostMemory(NamedTuple):
    """Pages in host memory, each for one block."""

    num_pages: int
    page_bytes: int
    load_page_s: float
    """Seconds to copy one to a block."""
