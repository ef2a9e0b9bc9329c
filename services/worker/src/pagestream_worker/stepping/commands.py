"""What a worker asks of its engine. Picklable: the engine may be in another process."""

from collections.abc import Sequence
from dataclasses import dataclass

from pagestream_engine.request import Sibling


@dataclass(frozen=True)
class AdapterName:
    """A LoRA adapter as a request names it."""

    name: str
    path: str
    revision: str


@dataclass(frozen=True)
class AddGroup:
    """Run the choices of one prompt, or go on with those that have output tokens already."""

    prompt_token_ids: Sequence[int]
    siblings: Sequence[Sibling]
    cache_salt: bytes = b""
    priority: int = 0
    aged_classes: float = 0.0
    """Classes that it has risen by its age in the queue."""
    tenant: str = ""
    weight: float = 1.0
    """The tenant's."""
    waits_for_mark: bool = False
    """Whether a step that they enter waits for `StepMarked`: they were claimed before, and may have killed engines."""
    adapter: AdapterName | None = None
    """The LoRA adapter that computes them."""
    log: int = 0
    """Handle of the log for plain tokens (see PlainSequences); 0: all outputs are reported whole. Of a group of one
    sequence without logprobs only."""


@dataclass(frozen=True)
class AbortSequences:
    """Abort sequences; unknown ones are no error."""

    seq_ids: Sequence[str]


@dataclass(frozen=True)
class SetLimits:
    """Change what `Engine.set_limits` does."""

    max_num_seqs: int
    saves_blocks: bool


@dataclass(frozen=True)
class ReadBlocks:
    """Report the map of the blocks; the answer is a `BlockMap`."""


@dataclass(frozen=True)
class StepMarked:
    """Let the step of a `StepBegun` that waits run: Redis has the mark of its requests."""

    number: int


@dataclass(frozen=True)
class StartProfile:
    """Profile the next steps; the answer is a `ProfileAnswer`."""

    steps: int


@dataclass(frozen=True)
class InspectModel:
    """Read the configuration and the headers of another model; the answer is a `ModelInspected`."""

    source: str
    """Its folder or repository."""


@dataclass(frozen=True)
class FallAsleep:
    """Abort all sequences, and release the memory but for the weights. Answers: `OutputsEnded`, then `FellAsleep`."""


@dataclass(frozen=True)
class WakeUp:
    """Take that memory again; the answer is an `Awoken`."""


@dataclass(frozen=True)
class Stop:
    """End after the current step."""


Command = (
    AddGroup
    | AbortSequences
    | SetLimits
    | ReadBlocks
    | StepMarked
    | StartProfile
    | InspectModel
    | FallAsleep
    | WakeUp
    | Stop
)
