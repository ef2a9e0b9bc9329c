"""What the core and an executor say to each other: plan and result of a step, and what is prepared beside them.

Records are immutable and hold plain numbers, tuples and numpy arrays, which `wire` carries to other processes.
They name a running sequence by its row: a place in the runner's persistent batch, below `max_num_seqs`. A sequence is
sent once, as a `NewSequence`; each later plan has only what changed.

Last stand two records of the core alone, `ScheduledSequence` and `ScheduledStep`: what the scheduler chose, of which
`PlanBuilder` makes the plan.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from pagestream_grammars import Grammar

from pagestream_engine.errors import RequestFault
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
    them (see `kv_layout.KVLayout`). All sources are read before a target is written, and
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
