"""What goes between a worker and its engine, which may be in another process: commands to it, and its reports.

`COMMANDS` and `REPORTS` make frames of them for a pipe, where alone there are `Start`, `Program`, `Preload` and
`StepsTaken`.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, NamedTuple, Self, get_args

import msgspec

from pagestream_engine.config import EngineConfig
from pagestream_engine.errors import MessageError
from pagestream_engine.plan import KVLayout
from pagestream_engine.request import Choice, SequenceOutput
from pagestream_engine.sampling_params import SamplingParams
from pagestream_engine.stats import BlockMap, EngineStats
from pagestream_engine.wire.codec import Codec

if TYPE_CHECKING:
    from pagestream_engine.engine import Engine


class TokenColumns(NamedTuple):
    """A token each of sequences that go on, in the machine's byte order."""

    logs: bytes
    """Handles of the logs that they belong to, int64."""
    token_ids: bytes
    """int32."""
    text_lengths: bytes
    """Bytes of each text, int32."""
    text: bytes
    """All texts, UTF-8."""

    @property
    def num_tokens(self) -> int:
        """Number of rows."""
        return len(self.logs) // 8

    def rows(self) -> Iterator[tuple[int, int, str]]:
        """Yield the handle, token id and text of each row."""
        start = 0
        lengths = array("i", self.text_lengths)
        for log, token_id, length in zip(array("q", self.logs), array("i", self.token_ids), lengths, strict=True):
            yield log, token_id, self.text[start : start + length].decode()
            start += length

    @classmethod
    def of(cls, logs: Iterable[int], token_ids: Iterable[int], texts: Sequence[str]) -> TokenColumns:
        """Pack rows. UnicodeEncodeError for half a surrogate pair, which UTF-8 and JSON do not have."""
        joined = "".join(texts)
        text = joined.encode()
        lengths = map(len, texts) if len(text) == len(joined) else (len(each.encode()) for each in texts)
        return cls(array("q", logs).tobytes(), array("i", token_ids).tobytes(), array("i", lengths).tobytes(), text)


ENGINE = "pagestream_engine.engine:Engine"
"""What makes an engine, see `Program.make_engine`."""
NO_TOKENS = TokenColumns(b"", b"", b"", b"")


class Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A command, a report, or a part of one."""


class AdapterName(Message, frozen=True):
    """A LoRA adapter as a request names it."""

    name: str
    path: str
    revision: str


class AddGroup(Message, frozen=True):
    """Run the choices of one prompt, or go on with those that have output tokens already."""

    prompt_token_ids: Sequence[int]
    choices: Sequence[Choice]
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
    log_handle: int = 0
    """Handle of the log for plain tokens (see PlainSequences); 0: all outputs are reported whole. Of a group of one
    sequence without logprobs only."""


class AbortSequences(Message, frozen=True):
    """Abort sequences; unknown ones are no error."""

    seq_ids: Sequence[str]


class SetLimits(Message, frozen=True):
    """Change what `Engine.set_limits` does."""

    max_num_seqs: int
    saves_blocks: bool


class ReadBlocks(Message, frozen=True):
    """Report the map of the blocks; the answer is a `BlockMap`."""


class StepMarked(Message, frozen=True):
    """Let the step of a `StepBegun` that waits run: Redis has the mark of its requests."""

    number: int


class StartProfile(Message, frozen=True):
    """Profile the next steps; the answer is a `ProfileAnswer`."""

    steps: int


class InspectModel(Message, frozen=True):
    """Read the configuration and the headers of another model; the answer is a `ModelInspected`."""

    source: str
    """Its folder or repository."""


class FallAsleep(Message, frozen=True):
    """Abort all sequences, and release the memory but for the weights. Answers: `OutputsEnded`, then `FellAsleep`."""


class WakeUp(Message, frozen=True):
    """Take that memory again; the answer is an `Awoken`."""


class Stop(Message, frozen=True):
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


class ModelFacts(Message, frozen=True):
    """What gateways know of a model beside its files."""

    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    is_deterministic: bool
    pooled_size: int
    """Numbers of a vector that is pooled from a prompt; 0: the model gives none."""
    revision: str
    """See model_revision, which needs torch."""
    takes_adapters: bool
    """Whether LoRA adapters may change it."""


class EngineFacts(ModelFacts, frozen=True):
    """What is fixed once the model is loaded."""

    kv_layout: KVLayout
    """The KV groups, whose blocks are of one pool."""
    max_num_seqs: int
    max_num_batched_tokens: int
    interrupts: bool
    """Whether class 0 takes room from lower classes."""
    queue_order: str
    """The policy by which the model's queue goes."""
    fingerprint: str
    memory_bytes: Mapping[str, int]
    """Device memory by use."""
    load_s: Mapping[str, float]
    """Seconds by part of the load."""
    stats: EngineStats
    """Before the first request."""

    @classmethod
    def of(cls, engine: Engine) -> Self:
        """Read the facts of an engine."""
        scheduler = engine.config.scheduler
        return cls(
            kv_layout=engine.kv_layout,
            max_num_seqs=scheduler.max_num_seqs,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
            interrupts=engine.interrupts,
            queue_order=engine.queue_order,
            max_model_len=engine.max_model_len,
            vocab_size=engine.vocab_size,
            eos_token_ids=engine.eos_token_ids,
            fingerprint=engine.fingerprint,
            is_deterministic=engine.is_deterministic,
            takes_adapters=engine.config.adapters.enable_lora,
            pooled_size=engine.pooled_size,
            revision=engine.revision,
            memory_bytes=dict(engine.memory_bytes()),
            load_s=dict(engine.load_s),
            stats=engine.stats(),
        )


class GpuUse(Message, frozen=True):
    """A reading of the devices of this machine that an engine computes on."""

    memory_bytes: int
    """In use by all processes, of all devices."""
    utilization: float | None
    """Share of the last sampling period in which they computed, in [0, 1]; None without NVIDIA's library."""


class Figures(Message, frozen=True):
    """The engine's figures at one moment. A report of its own where no step follows a command, and as a heartbeat."""

    stats: EngineStats
    fragmentation: float
    """See Engine.fragmentation; up to half a second old while there is work."""
    gpu: GpuUse | None
    """Seconds old; None without a GPU."""
    num_commands: int
    """`AddGroup` and `AbortSequences` executed so far."""
    is_busy: bool
    """Whether it has work: a further report follows without a further command."""

    @classmethod
    def at_start(cls, facts: EngineFacts) -> Self:
        """Return the figures of an engine that has had no request."""
        return cls(facts.stats, 0.0, None, 0, is_busy=False)


class Loaded(Message, frozen=True):
    """The model is loaded. The first report."""

    facts: EngineFacts


class LoadFailed(Message, frozen=True):
    """The model can't be loaded. The only report."""

    error: str
    is_option: bool
    """Whether an option or the model is wrong (an EngineError), so that another start would fail as well."""
    is_permanent: bool = False
    """Whether files or options are at fault, so that another load would fail as well."""


class StepBegun(Message, frozen=True):
    """A step with prompts, or one that a request enters or leaves unfinished, is about to run."""

    number: int
    """Counts these reports."""
    entered: frozenset[str]
    """Requests of which a sequence enters the step."""
    left: frozenset[str]
    """Requests that have no sequence in the step any more: they were preempted."""
    remaining: Mapping[str, int]
    """For each sequence with prompt tokens in the step: the tokens that it needs computed after it."""
    waits: bool
    """Whether the step waits for `StepMarked`, for at most MARK_LIMIT_S."""
    figures: Figures


class StepDone(Message, frozen=True):
    """A step has run, or the first of two steps in flight was launched."""

    outputs: Sequence[SequenceOutput]
    duration_s: float
    """Of the engine's call; with two steps in flight, from one launch to the next."""
    num_sequences: int
    """In the step that has run; 0 where none has."""
    has_prompts: bool
    figures: Figures
    tokens: TokenColumns = NO_TOKENS
    """Plain tokens, which are not among the outputs. A sequence's come before its output."""


class Refused(Message, frozen=True):
    """A group could not be added; each of its sequences ends with the error."""

    outputs: Sequence[SequenceOutput]


class ProfileAnswer(Message, frozen=True):
    """The answer to `StartProfile`."""

    path: str = ""
    """Of the trace, which exists once the steps are done."""
    error: str = ""
    """Why there is none."""


class ModelInspected(Message, frozen=True):
    """The answer to `InspectModel`."""

    source: str
    """As it was asked for."""
    facts: ModelFacts | None
    error: str = ""
    """Why the model can't be loaded, as far as its headers show."""
    is_permanent: bool = False
    """Whether files or options are at fault; False: the error may pass, such as one of storage or of the network."""


class OutputsEnded(Message, frozen=True):
    """The first answer to `FallAsleep`: no output follows until a command after `WakeUp`."""


class FellAsleep(Message, frozen=True):
    """The second answer to `FallAsleep`."""

    error: str = ""
    """Why the engine is of no use any more; "" where it sleeps."""


class Awoken(Message, frozen=True):
    """The answer to `WakeUp`."""

    error: str = ""
    """Why the engine is of no use any more; "" where it is as after its load."""
    duration_s: float = 0.0


class Ended(Message, frozen=True):
    """The engine has ended. The last report."""

    error: str = ""
    """The error that ended it; "" after `Stop`."""
    is_link_lost: bool = False
    """Whether it ended because another machine of its group fell silent."""


Report = (
    Loaded
    | LoadFailed
    | Figures
    | StepBegun
    | StepDone
    | Refused
    | ProfileAnswer
    | BlockMap
    | ModelInspected
    | OutputsEnded
    | FellAsleep
    | Awoken
    | Ended
)


class Start(Message, frozen=True):
    """What the process is told first."""

    path: Sequence[str]
    """`sys.path` of the worker."""


class Program(Message, frozen=True):
    """What the process is told to load."""

    make_engine: str
    """`module:name` of a function of model and configuration that returns the engine. It is the one name that is
    resolved and called: a process hears it from the parent that started it, over a socket pair, and from nobody else.
    """
    model: str
    """Its folder or repository."""
    config: EngineConfig
    """Also what other models are inspected for."""
    log_format: str
    """See `TelemetrySettings`."""
    log_level: str
    engine_id: str
    """For the names of profiles."""
    profile_dir: Path | None = None
    """Folder for profiles; None: there are none."""


class Preload(Message, frozen=True):
    """What the process of a standby is told before its program."""

    module: str
    """To be imported, with torch and whatever else that needs."""


class StepsTaken(Message, frozen=True):
    """The worker has taken the reports of `count` further steps. Between an `EngineProcess` and its process."""

    count: int


_OWN = ("seed", "max_tokens", "min_tokens", "prompt_logprobs")
"""Parameters that the choices of a request may have of their own; the others of a group are sent once."""
_SCALARS = (bool, int, float, str, NoneType)


class PackedChoice(Message, frozen=True):
    """A `Choice` within a `PackedGroup`."""

    seq_id: str
    params: int
    """The place of its parameters in the group's."""
    own: tuple[int | None, int | None, int, int | None]
    """See _OWN."""
    output_token_ids: Sequence[int]
    index: int | None


class PackedGroup(Message, frozen=True):
    """An `AddGroup` as it is sent: 128 choices with a schema of 256 KiB were 45 MB, which took 3.8 s to check."""

    group: AddGroup
    """Without choices."""
    params: Sequence[bytes]
    """Frames of the different parameters."""
    choices: Sequence[PackedChoice]


_PARAMETERS = Codec(SamplingParams)


class CommandCodec(Codec):
    """A codec in whose frames the choices of a request share parameters: each is checked once, and one object then.

    The latest ones are kept on both sides, since each prompt of a request has a group of its own.
    """

    def __init__(self, *kinds: type) -> None:
        super().__init__(*(PackedGroup if kind is AddGroup else kind for kind in kinds))
        self._sent: tuple[SamplingParams | None, bytes] = (None, b"")
        self._received: tuple[bytes, SamplingParams | None] = (b"", None)

    def encode(self, record: object) -> bytearray:
        """Return a record's frame; see Codec."""
        return super().encode(self._packed(record) if isinstance(record, AddGroup) else record)

    def decode(self, frame: bytes | bytearray | memoryview) -> Any:
        """Return the record of a frame; see Codec."""
        found = super().decode(frame)
        return self._unpacked(found) if isinstance(found, PackedGroup) else found

    def _packed(self, group: AddGroup) -> PackedGroup:
        frames: list[bytes] = []
        choices: list[PackedChoice] = []
        last: SamplingParams | None = None
        for choice in group.choices:
            if not isinstance(choice, Choice):
                raise MessageError(f"AddGroup can't be sent: given the choice {choice!r:.80}, expected a Choice")
            params = choice.params
            if last is None or not _are_alike(params, last):
                frames.append(self._frame_of(params))
                last = params
            own = (params.seed, params.max_tokens, params.min_tokens, params.prompt_logprobs)
            choices.append(PackedChoice(choice.seq_id, len(frames) - 1, own, choice.output_token_ids, choice.index))
        return PackedGroup(msgspec.structs.replace(group, choices=()), frames, choices)

    def _frame_of(self, params: SamplingParams) -> bytes:
        last, frame = self._sent
        if last is None or not _are_alike(params, last):
            frame = bytes(_PARAMETERS.encode(params))
            self._sent = params, frame
        return frame

    def _unpacked(self, packed: PackedGroup) -> AddGroup:
        params = [self._params_of(frame) for frame in packed.params]
        if any(not 0 <= choice.params < len(params) for choice in packed.choices):
            raise MessageError(f"a group has {len(params)} parameters, and a choice that names others")
        choices = [
            Choice(
                choice.seq_id,
                params[choice.params].with_own(**dict(zip(_OWN, choice.own, strict=True))),
                choice.output_token_ids,
                choice.index,
            )
            for choice in packed.choices
        ]
        return msgspec.structs.replace(packed.group, choices=choices)

    def _params_of(self, frame: bytes) -> SamplingParams:
        known, params = self._received
        if params is None or known != frame:
            params = _PARAMETERS.decode(frame)
            self._received = frame, params
        return params


def _are_alike(first: SamplingParams, second: SamplingParams) -> bool:
    """Whether two differ by what choices have of their own alone. Lists count as equal only where they are one object:
    the choices of a request share theirs, and a long one is not compared."""
    if first is second:
        return True
    return all(
        name in _OWN or value is (other := getattr(second, name)) or (isinstance(value, _SCALARS) and value == other)
        for name, value in vars(first).items()
    )


COMMANDS = CommandCodec(*get_args(Command), Start, Program, Preload, StepsTaken)
"""To the engine's process."""
REPORTS = Codec(*get_args(Report))
"""To the worker."""


def request_id_of(seq_id: str) -> str:
    """Return the id of a sequence's request: `<request id>/<nonce of the claim>/<choice>`."""
    return seq_id.partition("/")[0]
