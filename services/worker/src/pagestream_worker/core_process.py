"""The engine's side of a worker: the program of its process, `pagestream-engine-core`, and the loop that steps it.

The main thread loads the model and runs the `StepLoop`; a second thread reads commands, which are executed between two
steps. Each step is reported once, when it has run, and before it runs where its requests or prompts change. Where the
worker has the engine on a thread of its own (`EngineThread`), that thread runs the same loop. Below it is what it
keeps of the sequences in its steps, and torch profiles of them on demand, for chrome://tracing or Perfetto.

The process imports nothing that talks to Redis.
"""

from __future__ import annotations

import gc
import importlib
import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from pagestream_engine.config import EngineConfig
from pagestream_engine.engine import Engine
from pagestream_engine.errors import (
    AdapterError,
    ConfigError,
    EngineError,
    InvalidRequest,
    ModelError,
    ModelNotFound,
    RankLost,
    SleepFailed,
    UnsupportedModel,
)
from pagestream_engine.executor.child import die_with_parent
from pagestream_engine.models.folder import model_revision, resolve_model
from pagestream_engine.models.tokenizer import load_tokenizer
from pagestream_engine.output import REPLAY_TOKENS
from pagestream_engine.plan import ScheduledStep
from pagestream_engine.request import Choice, Request, SequenceOutput, choice_id
from pagestream_engine.wire.codec import Frames
from pagestream_engine.wire.worker import (
    COMMANDS,
    NO_TOKENS,
    REPORTS,
    AbortSequences,
    AddGroup,
    Awoken,
    Ended,
    EngineFacts,
    FallAsleep,
    FellAsleep,
    Figures,
    InspectModel,
    Loaded,
    LoadFailed,
    ModelFacts,
    ModelInspected,
    OutputsEnded,
    Preload,
    ProfileAnswer,
    Program,
    ReadBlocks,
    Refused,
    Report,
    SetLimits,
    StartProfile,
    StepBegun,
    StepDone,
    StepMarked,
    StepsTaken,
    Stop,
    TokenColumns,
    WakeUp,
    request_id_of,
)
from pagestream_telemetry.logs import configure_logs
from pagestream_telemetry.settings import TelemetrySettings
from setproctitle import setproctitle

from pagestream_worker.gpu import GpuMonitor, gpus_of

logger = logging.getLogger(__name__)


TITLE = "pagestream-engine-core"


EXIT_FAILED = 1


# Counted in steps, not bytes: a step's report has 0.7 to 20 kB, so a bound of bytes alone bounds nothing.
STEPS_AHEAD = 8
"""Step reports that a worker may have before it without having taken them. Then the engine waits."""


IDLE_WAIT_S = 1.0  # longest wait for a command, and between two heartbeats of an idle engine; a command ends it at once


FRAGMENTATION_PERIOD_S = 0.5  # between two readings of the fragmentation, which walks over all sequences


ADD_LIMIT_S = 0.005
"""128 choices with long lists took 80 ms at once, and 524,288 tokens with stop strings take 7 s."""


MARK_LIMIT_S = 0.25  # longest wait of a step for `StepMarked`


YOUNG_OBJECTS = 20_000
"""Between two collections; a few MB. Python's 700 are less than a step of 256 sequences makes."""


_READ_BYTES = 1 << 18


_FAULT_POINTS = "PAGESTREAM_FAULT_POINTS"


_REQUEST_TIMEOUT_S = 60.0  # a profile that has not begun (an idle engine has no steps) may be replaced after so long


QueuedCommand = AddGroup | AbortSequences | SetLimits | ReadBlocks | FallAsleep | WakeUp | Stop


LoopCommand = QueuedCommand | StepMarked


def main() -> None:
    """Run the program that `engine_core.launch` starts: the arguments are a descriptor and the worker's process id."""
    serve(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))


def serve(end: socket.socket, parent: int) -> None:
    """Run what the worker at the other end asks for, then exit the process. Never returns."""
    setproctitle(TITLE)
    # Signals to a whole group or container are the worker's: it ends this process when the last step has run.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    die_with_parent(parent)
    connection = Connection(end)
    sys.path[:] = connection.read().path
    message = connection.read()
    if isinstance(message, Preload):
        importlib.import_module(message.module)
        message = connection.read()
    program: Program = message
    configure_logs(TelemetrySettings(log_format=program.log_format, log_level=program.log_level))
    code = EXIT_FAILED
    try:
        code = run(connection, program)
    except OSError as error:  # the worker has gone
        logger.info("the worker has closed the connection: %s", error)
    finally:
        logging.shutdown()
        os._exit(code)  # nothing is left to be done, and what libraries do at an exit takes a second


def run(connection: Connection, program: Program) -> int:
    """Load and step the engine; return the exit code."""
    queue = CommandQueue()
    profiler = None if program.profile_dir is None else StepProfiler(program.profile_dir, program.engine_id)
    commands = Commands(connection, queue, profiler, program.config)
    commands.start()
    try:
        engine = load_engine(program.make_engine, program.model, program.config)
        commands.is_deterministic = engine.is_deterministic
        connection.report(Loaded(EngineFacts.of(engine)))
    except EngineError as error:
        connection.report(LoadFailed(str(error), is_option=True, is_permanent=is_permanent(error)))
        return EXIT_FAILED
    except BaseException as error:  # also the panic of a library in Rust
        logger.critical("the model can't be loaded", exc_info=error)
        connection.report(LoadFailed(_in_words(error), is_option=False))
        return EXIT_FAILED
    loop = StepLoop(engine, queue, connection.report, profiler=profiler, before_marked_step=_fault_point())
    try:
        loop.run()
        engine.close()
    except BaseException as error:  # also SystemExit, KeyboardInterrupt, the panic of a library in Rust
        logger.critical("the engine failed", exc_info=error)
        connection.report(Ended(_in_words(error), is_link_lost=isinstance(error, RankLost) and error.is_link_lost))
        return EXIT_FAILED
    connection.report(Ended())
    return 0


def _fault_point() -> Callable[[], None]:
    """Return what passes the fault point of a step; without a harness nothing of the broker's code is imported."""
    if _FAULT_POINTS not in os.environ:
        return lambda: None
    from pagestream_streams.fault_points import FaultPoint, reach

    return lambda: reach(FaultPoint.PREFILL)


def _in_words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def is_permanent(error: EngineError) -> bool:
    """Return whether files or options are at fault, so that no later attempt can succeed with the same ones.

    A file that can't be read, a repository that can't be reached and a machine without memory may be well again.
    """
    if isinstance(error, ModelNotFound):
        return error.__cause__ is None  # else the repository was asked for, in vain
    cause = error.__cause__ or error.__context__
    is_storage = isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError)
    return isinstance(error, ModelError | ConfigError) and not is_storage


def load_engine(make_engine: str, model: str, config: EngineConfig) -> Engine:
    """Load the model.

    Args:
        make_engine: see `Program.make_engine`.

    Raises:
        EngineError: the model can't be loaded with these settings.
    """
    engine: Engine = resolve_name(make_engine)(model, config)
    spare_what_lives()
    return engine


def spare_what_lives() -> None:
    """Exclude all objects from garbage collection that there are now, and collect young ones less often.

    Call it when what lives as long as the process has been loaded: a collection that walks it would be a pause between
    two tokens. A step makes few cycles, but thousands of short-lived objects a second.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS)


class Connection:
    """This process' end of the connection to its worker."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._frames = Frames(COMMANDS)
        self._received: deque[Any] = deque()
        self._sending = threading.Lock()
        self._steps_ahead = StepsAhead()

    def read(self) -> Any:
        """Wait for the next message. Exit the process where the worker has closed the connection, or is dead."""
        while not self._received:
            data = self._socket.recv(_READ_BYTES)
            if not data:
                os._exit(0)
            self._received.extend(self._frames.feed(data))
        return self._received.popleft()

    def report(self, report: Report) -> None:
        """Send a report. Blocks while the worker has not taken the last STEPS_AHEAD steps, or the buffer is full.

        Both last until the worker reads, or its end of the connection closes: that ends this process (see `read`).
        """
        message = REPORTS.pack(report)
        with self._sending:
            self._socket.sendall(message)
        self._steps_ahead.wait(report)

    def note_taken(self, num_steps: int) -> None:
        """Note that the worker has taken the reports of further steps."""
        self._steps_ahead.note_taken(num_steps)


class StepsAhead:
    """The engine's side: waits where STEPS_AHEAD steps are not acknowledged."""

    def __init__(self) -> None:
        self._left = threading.Semaphore(STEPS_AHEAD - 1)
        self._is_lifted = False

    def wait(self, report: Report) -> None:
        """Count a report that was sent; after the last step that the engine may be ahead, wait for the worker."""
        if isinstance(report, StepDone) and not self._is_lifted:
            self._left.acquire()

    def note_taken(self, num_steps: int) -> None:
        """Note that the worker has taken the reports of further steps. Any thread may call this."""
        self._left.release(num_steps)

    def lift(self) -> None:
        """Wait no more: the worker takes no further report. Any thread may call this."""
        self._is_lifted = True
        self._left.release()


class Commands(threading.Thread):
    """Reads commands until the process ends."""

    def __init__(
        self, connection: Connection, queue: CommandQueue, profiler: StepProfiler | None, config: EngineConfig
    ) -> None:
        super().__init__(name="commands", daemon=True)
        self._connection, self._queue, self._profiler, self._config = connection, queue, profiler, config
        self.is_deterministic = False
        """Of the loaded engine."""

    def run(self) -> None:
        """Queue what is for the loop; answer what need not wait for a step. An error ends the process."""
        try:
            while True:
                command = self._connection.read()
                if isinstance(command, StartProfile):
                    self._connection.report(answer_profile(self._profiler, command.steps))
                elif isinstance(command, InspectModel):
                    self._inspect(command.source)
                elif isinstance(command, StepsTaken):
                    self._connection.note_taken(command.count)
                else:
                    self._queue.put(command)
        except BaseException as error:  # an engine that gets no command must not seem to work
            logger.critical("a command can't be read", exc_info=error)
            os._exit(EXIT_FAILED)

    def _inspect(self, source: str) -> None:
        """Read a model on a thread of its own: its storage may hang, and the engine's commands must not wait for it."""

        def answer() -> None:
            self._connection.report(inspect_model(source, self._config, is_deterministic=self.is_deterministic))

        threading.Thread(target=answer, name="inspect a model", daemon=True).start()


def inspect_model(source: str, config: EngineConfig, *, is_deterministic: bool) -> ModelInspected:
    """Read configuration, tokenizer and headers, and no tensor.

    Args:
        source: the model's folder or repository.
        config: that it would be loaded with.
        is_deterministic: whether the engine that would load it computes so now.
    """
    from pagestream_engine.models.registry import open_model  # needs torch

    try:
        folder = resolve_model(source)
        load_tokenizer(folder)
        model = open_model(folder)
        model.check_files()
        longest = max(model.info.max_position_embeddings, model.info.extended_context)
        context = config.model.max_model_len or model.info.max_position_embeddings
        if context > longest:
            raise UnsupportedModel(f"max_model_len: given {context}, expected at most {longest}, which {source} has")
        facts = ModelFacts(
            max_model_len=context,
            vocab_size=model.info.vocab_size,
            eos_token_ids=frozenset(model.info.eos_token_ids),
            is_deterministic=is_deterministic and model.can_be_deterministic,
            pooled_size=model.pooled_size,
            revision=model_revision(folder),
            takes_adapters=config.adapters.enable_lora,
        )
    except EngineError as error:
        return ModelInspected(source, None, str(error), is_permanent=is_permanent(error))
    except Exception as error:  # noqa: BLE001 - a file of another model must not end the engine that runs
        return ModelInspected(source, None, f"{source}: {type(error).__name__}: {error}")
    return ModelInspected(source, facts)


class CommandQueue:
    """Commands on their way to the loop. `put` may be called on any thread, the rest is the loop's."""

    def __init__(self) -> None:
        self._commands: queue.SimpleQueue[QueuedCommand] = queue.SimpleQueue()
        self._marks: queue.SimpleQueue[int] = queue.SimpleQueue()

    def put(self, command: LoopCommand) -> None:
        """Queue a command. A `StepMarked` passes the others: the running step waits for it."""
        if isinstance(command, StepMarked):
            self._marks.put(command.number)
        else:
            self._commands.put(command)

    def get(self, timeout_s: float) -> QueuedCommand | None:
        """Return the next command; None where none comes within the time."""
        try:
            return self._commands.get(block=timeout_s > 0, timeout=timeout_s)
        except queue.Empty:
            return None

    def wait_marked(self, number: int) -> None:
        """Wait for the `StepMarked` of a number, at most MARK_LIMIT_S."""
        until = time.monotonic() + MARK_LIMIT_S
        try:
            while self._marks.get(timeout=max(0.0, until - time.monotonic())) < number:
                pass
        except queue.Empty:
            logger.info("the requests of a step are not marked after %g s: it runs", MARK_LIMIT_S)


class StepLoop:
    """Steps one engine while it has work, on the thread that calls `run`.

    Args:
        engine: was created on the same thread.
        report: gets each report, on this thread.
        profiler: for profiles on demand; None: there are none.
        before_marked_step: called before a step that requests enter or leave, after their mark.
        add_limit_s: of executing commands before a step, of adding requests, and of replaying outputs.
    """

    def __init__(
        self,
        engine: Engine,
        commands: CommandQueue,
        report: Callable[[Report], None],
        *,
        profiler: StepProfiler | None = None,
        before_marked_step: Callable[[], None] = lambda: None,
        add_limit_s: float = ADD_LIMIT_S,
    ) -> None:
        self._engine = engine
        self._commands = commands
        self._report = report
        self._profiler = profiler
        self._before_marked_step = before_marked_step
        self._add_limit_s = add_limit_s
        self._adding: deque[tuple[AddGroup, Iterator[None]]] = deque()  # begun, choice by choice
        self._replaying: deque[tuple[AddGroup, Iterator[None]]] = deque()  # with long outputs of earlier runs
        self._members = StepMembers()
        self._plain = PlainSequences()
        self._unfinished: set[str] = set()  # ids of sequences
        self._waits_for_mark: set[str] = set()  # sequences of groups that asked for it
        self._gpu = GpuMonitor(gpus_of(engine.config))
        self._num_begun = self._num_commands = self._num_collected = 0
        self._is_changed = False
        self._fragmentation = self._fragmentation_due = 0.0

    def run(self) -> None:
        """Step until `Stop`. What the engine raises comes through."""
        self._engine.on_schedule = self._note_step
        self._gpu.start()
        try:
            while self._execute_commands():
                if self._adding or self._replaying:
                    self._add_on()
                self._step()
        finally:
            self._gpu.stop()

    # -- steps --

    def _step(self) -> None:
        if not self._engine.has_unfinished_requests():
            if self._is_changed:
                self._report_figures()
            return
        started = time.monotonic()
        outputs = self._run_step()
        duration_s = time.monotonic() - started
        tokens, others = self._plain.split(outputs)
        for output in others:
            if output.finish_reason is not None:
                self._forget(output.seq_id)
        self._is_changed = False
        figures = self._figures()
        stats = figures.stats
        is_collected = stats.num_steps > self._num_collected  # with two steps in flight, not by the first call
        self._num_collected = stats.num_steps
        num_sequences = stats.last_step_sequences if is_collected else 0
        has_prompts = is_collected and stats.last_step_prompt_tokens > 0
        self._report(StepDone(others, duration_s, num_sequences, has_prompts, figures, tokens))

    def _run_step(self) -> list[SequenceOutput]:
        profiler = self._profiler
        if profiler is None or not profiler.is_wanted:
            return self._engine.step()
        profiler.before_step()
        try:
            return self._engine.step()
        finally:
            profiler.after_step()

    def _note_step(self, step: ScheduledStep) -> None:
        num_requeues = self._engine.num_requeues
        if not step.prefills and num_requeues == self._members.num_requeues:
            return  # decodes alone: nobody entered, and whoever left has ended
        remaining = prefill_remaining(step)
        change = self._members.update(remaining, lambda: decoding(step), num_requeues)
        if change is None and not remaining:
            return
        self._num_begun += 1
        entered = change.entered if change is not None else frozenset[str]()
        left = change.left_requests if change is not None else frozenset[str]()
        waits = not self._waits_for_mark.isdisjoint(entered)
        requests = frozenset(map(request_id_of, entered))
        self._report(StepBegun(self._num_begun, requests, left, remaining, waits, self._figures()))
        if waits:
            self._commands.wait_marked(self._num_begun)
        if change is not None:
            self._before_marked_step()

    def _forget(self, seq_id: str) -> None:
        self._unfinished.discard(seq_id)
        self._members.discard(seq_id)
        self._waits_for_mark.discard(seq_id)
        self._plain.discard(seq_id)

    # -- figures --

    def _report_figures(self) -> None:
        self._is_changed = False
        self._report(self._figures())

    def _figures(self) -> Figures:
        engine, now = self._engine, time.monotonic()
        is_busy = bool(self._adding or self._replaying) or engine.has_unfinished_requests()
        if now >= self._fragmentation_due or not is_busy:
            self._fragmentation_due = now + FRAGMENTATION_PERIOD_S
            self._fragmentation = engine.fragmentation()
        return Figures(engine.stats(), self._fragmentation, self._gpu.latest, self._num_commands, is_busy)

    # -- commands --

    def _execute_commands(self) -> bool:
        """Execute what is queued, as far as its time goes; return False for `Stop`. An idle engine waits here."""
        is_idle = not (self._adding or self._replaying or self._engine.has_unfinished_requests())
        command = self._commands.get(IDLE_WAIT_S if is_idle else 0.0)
        if command is None and is_idle:
            self._is_changed = True  # a heartbeat
            self._engine.check_executor()
        until = time.monotonic() + self._add_limit_s
        while command is not None:
            if isinstance(command, Stop):
                return False
            self._execute(command)
            command = self._commands.get(0.0) if time.monotonic() < until else None
        return True

    def _execute(self, command: AddGroup | AbortSequences | SetLimits | ReadBlocks | FallAsleep | WakeUp) -> None:
        if isinstance(command, SetLimits):
            self._engine.set_limits(command.max_num_seqs, saves_blocks=command.saves_blocks)
            return
        if isinstance(command, ReadBlocks):
            self._report(self._engine.block_map())
            return
        if isinstance(command, FallAsleep):
            self._abort(set(self._unfinished))
            self._report(OutputsEnded())
            self._report(FellAsleep(self._fall_asleep()))
            return
        if isinstance(command, WakeUp):
            started = time.monotonic()
            error = self._wake_up()
            self._report(Awoken(error, time.monotonic() - started))
            return
        self._is_changed = True
        self._num_commands += 1
        if isinstance(command, AddGroup):
            self._begin_adding(command)
        else:
            self._abort(set(command.seq_ids))

    def _abort(self, seq_ids: set[str]) -> None:
        for seq_id in seq_ids:
            self._engine.abort_request(seq_id)
            self._forget(seq_id)
        # A group is claimed and aborted as a whole.
        self._adding = deque(each for each in self._adding if not seq_ids & _seq_ids(each[0]))
        self._replaying = deque(each for each in self._replaying if not seq_ids & _seq_ids(each[0]))

    def _fall_asleep(self) -> str:
        """Return why the engine can't go on; "" where it sleeps."""
        try:
            self._engine.sleep.begin()
        except (SleepFailed, InvalidRequest) as error:
            return str(error)
        return ""

    def _wake_up(self) -> str:
        """Return why the engine can't go on; "" where it is awake."""
        try:
            self._engine.sleep.end()
        except SleepFailed as error:
            return str(error)
        return ""

    def _begin_adding(self, command: AddGroup) -> None:
        self._unfinished |= _seq_ids(command)
        if command.waits_for_mark:
            self._waits_for_mark |= _seq_ids(command)
        if command.log_handle:
            self._plain.add(command.choices[0].seq_id, command.log_handle)
        is_long = sum(len(choice.output_token_ids) for choice in command.choices) > REPLAY_TOKENS
        (self._replaying if is_long else self._adding).append((command, self._adding_group(command)))

    def _adding_group(self, command: AddGroup) -> Iterator[None]:
        """Add a group in parts."""
        adapter, given = None, command.adapter
        if given is not None:
            adapter = self._engine.adapters.pinned(given.name, given.path, given.revision)
        request = Request(
            command.prompt_token_ids,
            command.choices,
            priority=command.priority,
            aged_classes=command.aged_classes,
            tenant=command.tenant,
            weight=command.weight,
            cache_salt=command.cache_salt,
            adapter=adapter,
        )
        yield from self._engine.adding(request)

    def _add_on(self) -> None:
        """Go on with the groups that are being added, for at most `add_limit_s` of each kind before the next step."""
        for groups in (self._adding, self._replaying):
            until = time.monotonic() + self._add_limit_s
            while groups and self._add(*groups[0], until):
                groups.popleft()

    def _add(self, command: AddGroup, adding: Iterator[None], until: float) -> bool:
        """Add a group until a time on time.monotonic(); return whether it is done, or refused."""
        try:
            for _ in adding:
                if time.monotonic() >= until:
                    return False
        except (InvalidRequest, AdapterError) as error:
            for seq_id in _seq_ids(command):
                self._forget(seq_id)
            self._report(Refused([_refused(choice, error) for choice in command.choices]))
        return True


def _seq_ids(command: AddGroup) -> set[str]:
    return {choice.seq_id for choice in command.choices}


def _refused(choice: Choice, error: InvalidRequest | AdapterError) -> SequenceOutput:
    is_fault = isinstance(error, InvalidRequest)
    return SequenceOutput(choice.seq_id, None, "", "error", error=str(error), is_request_fault=is_fault)


class PlainSequences:
    """The sequences whose outputs go as columns: those whose group named a log, from their second token to the last but
    one. The first and the last one mean more than a token to a worker.
    """

    def __init__(self) -> None:
        self._new: dict[str, int] = {}
        """Sequences without an output, with the handles of their logs."""
        self._begun: dict[str, int] = {}

    def add(self, seq_id: str, log_handle: int) -> None:
        """Add a sequence that has had no output yet, all of whose tokens are without logprobs."""
        self._new[seq_id] = log_handle

    def discard(self, seq_id: str) -> None:
        """Remove a sequence that has ended or was aborted, if it is one of these."""
        self._new.pop(seq_id, None)
        self._begun.pop(seq_id, None)

    def split(self, outputs: Iterable[SequenceOutput]) -> tuple[TokenColumns, list[SequenceOutput]]:
        """Return the plain tokens of a step, and its other outputs.

        A sequence's plain tokens come before its other output: that is its last one.
        """
        begun, others = self._begun, list[SequenceOutput]()
        log_handles, token_ids, texts = list[int](), list[int](), list[str]()
        for output in outputs:
            log_handle = begun.get(output.seq_id)
            if log_handle is None or output.finish_reason is not None:
                others.append(output)
            else:
                log_handles.append(log_handle)
                token_ids.append(output.token_id)  # type: ignore[arg-type]
                texts.append(output.text)
        for output in others:
            if output.token_id is not None and output.seq_id in self._new:
                self._begun[output.seq_id] = self._new.pop(output.seq_id)
        return (TokenColumns.of(log_handles, token_ids, texts) if log_handles else NO_TOKENS), others


class StepMembers:
    """The sequences of the running step, by id."""

    def __init__(self) -> None:
        self._members: set[str] = set()
        self.num_requeues = 0
        """Of the engine, at the last update."""

    def update(
        self, prefilling: Collection[str], decoding: Callable[[], Collection[str]], num_requeues: int
    ) -> MembershipChange | None:
        """Apply a step that is about to run. Returns None where no sequence entered and none left unfinished.

        A sequence enters with a chunk of its prompt, and leaves unfinished only where it goes back to the queue
        (preempted, or rolled back with a failed step); ends are reported to `discard`. So a step of decodes without a
        new requeue needs no look at its sequences.

        Args:
            prefilling: sequences with prompt tokens in the step.
            decoding: returns its other sequences; called only after a requeue.
        """
        requeued = num_requeues != self.num_requeues
        self.num_requeues = num_requeues
        entered = frozenset(prefilling) - self._members
        left: set[str] = set()
        if requeued:
            left = self._members.difference(prefilling, decoding())
        self._members |= entered
        self._members -= left
        if not entered and not left:
            return None
        left_requests = {request_id_of(seq_id) for seq_id in left}
        if left_requests:
            left_requests.difference_update(map(request_id_of, self._members))
        return MembershipChange(entered, frozenset(left_requests))

    def discard(self, seq_id: str) -> None:
        """Remove a sequence that has ended or was aborted."""
        self._members.discard(seq_id)


@dataclass(frozen=True)
class MembershipChange:
    """Sequences that entered a step, and requests of which no sequence is in it any more."""

    entered: frozenset[str]
    left_requests: frozenset[str]


def prefill_remaining(step: ScheduledStep) -> Mapping[str, int]:
    """Return, for each sequence with prompt tokens in the step, the tokens that it needs computed after it."""
    remaining = {choice_id(seq.seq_id): 0 for chunk in step.prefills for seq in chunk.siblings}
    for chunk in step.prefills:
        seq = chunk.seq
        remaining[choice_id(seq.seq_id)] = seq.num_unsent_tokens - chunk.num_scheduled_tokens
    return remaining


def decoding(step: ScheduledStep) -> set[str]:
    """Return the sequences that the step only decodes."""
    return {choice_id(entry.seq.seq_id) for entry in step.decodes}


class StepProfiler:
    """`request` may be called on any thread, the rest is for the thread that steps.

    Args:
        folder: for the traces; created with the first one.
        name: the engine's, for the files' names.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._name = name
        self._lock = threading.Lock()
        self._wanted = 0
        self._path: Path | None = None
        self._requested_at = 0.0
        self._profile: Any = None
        self.is_wanted = False
        """Whether the next step is to be profiled."""

    def request(self, steps: int) -> str:
        """Profile the next `steps` steps; returns the path of the trace, which exists once they are done.

        Raises:
            RuntimeError: a profile is running.
        """
        with self._lock:
            if self._path is not None and (self._profile is not None or not self._is_stale()):
                raise RuntimeError(f"a profile is running: {self._path}")
            stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
            self._path = self._free_path(f"{self._name}-{stamp}")
            self._wanted, self._requested_at, self.is_wanted = steps, time.monotonic(), True
            logger.info("profiling %d steps", steps, extra={"path": str(self._path)})
            return str(self._path)

    def before_step(self) -> None:
        """Start the profiler before the first of the steps."""
        if self._profile is None:
            import torch

            activities = [torch.profiler.ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(torch.profiler.ProfilerActivity.CUDA)
            self._profile = torch.profiler.profile(activities=activities)
            self._profile.start()

    def after_step(self) -> None:
        """Count a step. After the last one a thread of its own writes the trace while steps go on."""
        self._wanted -= 1
        if self._wanted > 0 or self._profile is None or self._path is None:
            return
        self._profile.stop()
        self.is_wanted = False
        threading.Thread(target=self._write, args=(self._profile, self._path), name="profile", daemon=True).start()

    def _write(self, profile: Any, path: Path) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            # Renamed when it is complete: a reader that waits for the path never sees a part.
            partial = path.with_name(f".{path.name}")
            profile.export_chrome_trace(str(partial))
            partial.rename(path)
            logger.info("profile written", extra={"path": str(path)})
        except (OSError, RuntimeError) as error:
            logger.error("the profile can't be written: %s", error, extra={"path": str(path)})
        finally:
            with self._lock:
                self._profile, self._path = None, None

    def _is_stale(self) -> bool:
        return time.monotonic() - self._requested_at > _REQUEST_TIMEOUT_S

    def _free_path(self, stem: str) -> Path:
        paths = (self._folder / f"{stem}{ending}.json" for ending in ("", *(f"-{n}" for n in range(2, 1000))))
        return next(path for path in paths if not path.exists())


def answer_profile(profiler: StepProfiler | None, steps: int) -> ProfileAnswer:
    """Answer `StartProfile`. Any thread may call this."""
    if profiler is None:
        return ProfileAnswer(error="no profile is written: start the process with --profile-dir")
    try:
        return ProfileAnswer(path=profiler.request(steps))
    except RuntimeError as error:
        return ProfileAnswer(error=str(error))
