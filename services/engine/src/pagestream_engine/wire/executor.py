"""What goes between an engine and the processes that compute, on this machine or others: to them plans and what is to
be prepared, and from them results and what came of that.

`PLANS` and `ANSWERS` make frames of these messages. The plan and the result of a step are of the engine's ground, see
`plan`; the other messages stand here.
"""

from __future__ import annotations

import builtins
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pagestream_grammars import Grammar

from pagestream_engine import errors
from pagestream_engine.errors import EngineError, ExecutorError
from pagestream_engine.plan import (
    AdapterLoad,
    HostMemory,
    KVLayout,
    LoadedAdapter,
    PreparedGrammar,
    StepPlan,
    StepResult,
)
from pagestream_engine.wire.codec import Codec


class SleepChange(NamedTuple):
    """The executor is to give up its memory but for the weights, or to have it again. It is done between two steps."""

    is_asleep: bool
    """Whether it is to give it up."""


class SleepChanged(NamedTuple):
    """A `SleepChange` was made, or could not be: the executor can't go on then."""

    is_asleep: bool
    error: str | None


Preparation = Grammar | AdapterLoad | SleepChange
Prepared = PreparedGrammar | LoadedAdapter | SleepChanged


@dataclass(frozen=True, slots=True)
class ExecutorFacts:
    """What the engine knows of an executor that has loaded."""

    vocab_size: int
    max_position_embeddings: int
    eos_token_ids: frozenset[int]
    fingerprint: str
    kv_layout: KVLayout
    """The model's KV groups: a sequence has a block table for each."""
    num_blocks: int
    """KV blocks of its pool."""
    memory_bytes: Mapping[str, int]
    """Bytes of the device's memory by use; empty for a runner without any."""
    num_speculative_tokens: int = 0
    """Most drafts that a sequence has in a step; 0 for a runner without any."""
    is_deterministic: bool = False
    """Whether a token's logits depend on its sequence alone, bit for bit."""
    pooled_size: int = 0
    """Numbers of a vector that is pooled from a prompt; 0: it gives none."""
    has_head: bool = True
    """Whether the model gives logits."""
    host_memory: HostMemory | None = None
    """For blocks that are evicted; None without `swap_space`."""
    load_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds by part of the load: import (of torch and the runner), weights, cache, warm_up."""
    has_grammars: bool = False
    """Whether sequences may have a grammar."""


LOADING = -1
_Plain = str | int | float | bool | None
_ERRORS = {
    name: kind
    for module in (builtins, errors)
    for name, kind in vars(module).items()
    if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, ExceptionGroup)
}
"""The errors that come through as what they are: Python's own, and the engine's."""


class Failure(NamedTuple):
    """An error, in place of an answer."""

    step_id: int
    """Of the plan that failed; LOADING before the first."""
    kind: str
    """Name of its class, one of `_ERRORS`."""
    arguments: Sequence[_Plain]
    state: Mapping[str, _Plain]
    """Attributes, such as `field` of a ConfigError."""
    notes: Sequence[str]

    @classmethod
    def of(cls, error: BaseException, step_id: int) -> Failure:
        """Return an error as a message: an ExecutorError that describes it where it can't come through as it is."""
        notes, state = list(getattr(error, "__notes__", ())), vars(error)
        kind = type(error)
        is_known = _ERRORS.get(kind.__name__) is kind and all(isinstance(each, _Plain) for each in error.args)
        if not is_known:
            return cls(step_id, ExecutorError.__name__, [f"{kind.__name__}: {error}"], {}, notes)
        plain = {name: value for name, value in state.items() if isinstance(value, _Plain)}
        return cls(step_id, kind.__name__, list(error.args), plain, notes)

    @property
    def error(self) -> Exception:
        """The error, to be raised."""
        kind = _ERRORS.get(self.kind, ExecutorError)
        error: Exception
        if issubclass(kind, EngineError):  # whose constructors take other things than the text that they make of them
            make = Exception if issubclass(kind, MemoryError) else kind
            error = make.__new__(kind, *self.arguments)
            error.args = tuple(self.arguments)
        else:
            try:
                error = kind(*self.arguments)
            except TypeError:  # not what `of` gives
                error = ExecutorError(f"{self.kind}: {self.arguments}")
        vars(error).update({name: value for name, value in self.state.items() if name != "__notes__"})
        for note in self.notes:
            error.add_note(note)
        return error


PLANS = Codec(StepPlan, Grammar, AdapterLoad, SleepChange)
"""To a process that computes."""
ANSWERS = Codec(
    ExecutorFacts, StepResult, Failure, PreparedGrammar, LoadedAdapter, SleepChanged, max_bytes=(1 << 32) - 1
)
"""From it. The log probabilities of a prompt by all tokens of a vocabulary are gigabytes."""
