"""The worker's side of an engine, wherever it runs: commands in, reports out.

`EngineCore` is what a worker sees; `EngineProcess` runs the engine in a process of its own, which shares no interpreter
lock with the event loop that talks to Redis, and `EngineThread` on a thread. A thread creates its engine itself, since
OpenMP gives each computing thread its own team of threads, and two teams compete for the cores (measured on two cores:
1,230 tokens a second, and 1,050 where another thread had loaded the model).
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from math import inf
from typing import Protocol, TypeVar, cast

from pagestream_engine.engine import Engine
from pagestream_engine.errors import EngineError, MessageError, ModelError, RankLost
from pagestream_engine.request import SequenceOutput
from pagestream_engine.stats import BlockMap
from pagestream_engine.wire.codec import Frames
from pagestream_engine.wire.worker import (
    COMMANDS,
    NO_TOKENS,
    REPORTS,
    AbortSequences,
    AddGroup,
    Awoken,
    Command,
    Ended,
    EngineFacts,
    FallAsleep,
    FellAsleep,
    Figures,
    InspectModel,
    Loaded,
    LoadFailed,
    ModelInspected,
    OutputsEnded,
    Preload,
    ProfileAnswer,
    Program,
    ReadBlocks,
    Refused,
    Report,
    Start,
    StartProfile,
    StepBegun,
    StepDone,
    StepsTaken,
    Stop,
    TokenColumns,
    WakeUp,
)
from pagestream_streams.fault_points import FaultPoint, reach

from pagestream_worker.core_process import (
    ADD_LIMIT_S,
    STEPS_AHEAD,
    CommandQueue,
    StepLoop,
    StepProfiler,
    StepsAhead,
    answer_profile,
)

TakeOutputs = Callable[[Sequence[SequenceOutput], TokenColumns], None]
PROFILE_LIMIT_S = 5.0
"""Seconds to wait for the answer to a request for a profile."""


class EngineCoreError(RuntimeError):
    """The engine ended by an error, or its process was ended.

    Args:
        message: what happened.
        is_link_lost: whether it is because another machine of its group fell silent.
    """

    def __init__(self, message: str, *, is_link_lost: bool = False) -> None:
        self.is_link_lost = is_link_lost
        super().__init__(message)


def is_link_lost(error: BaseException | None) -> bool:
    """Return whether an engine ended because another machine of its group fell silent."""
    return isinstance(error, EngineCoreError | RankLost) and error.is_link_lost


class EngineCore(Protocol):
    """An engine that runs on a thread of this process (`EngineThread`) or in another process (`EngineProcess`).

    Every report is handled on the event loop, in the order in which it was made; the end comes after all others.
    """

    loaded: Future[EngineFacts]
    """The facts, or the error of the load."""
    ended: Future[None]
    """Done after the last callback; with the error that ended the engine."""

    def load(self) -> None:
        """Begin to load the model, where the start has not. To be called once."""

    def listen(
        self,
        *,
        on_outputs: TakeOutputs,
        on_begun: Callable[[StepBegun], None],
        on_step: Callable[[float, int], None],
        on_outputs_ended: Callable[[], None] = lambda: None,
    ) -> None:
        """Set the callbacks, on the event loop that they are called on, before the first command.

        Args:
            on_outputs: gets a step's outputs, and before them, in time, its plain tokens.
            on_begun: gets a change of the running step, before that runs.
            on_step: gets a step's duration in seconds and its number of sequences.
            on_outputs_ended: called where no outputs follow, because of `fall_asleep`.
        """

    def submit(self, command: Command) -> None:
        """Send a command, which is executed before the next step. For the event loop alone."""

    def fall_asleep(self) -> None:
        """Let the engine abort all sequences, and free its memory but for weights in host memory."""

    def request_profile(self, steps: int) -> str:
        """Profile the next `steps` steps, and return the path of the trace. Not for the event loop: it waits.

        Raises:
            RuntimeError: there can be none now; the message says why.
        """

    def read_blocks(self) -> Future[BlockMap]:
        """Return the next map of the blocks, made between two steps. For the event loop alone.

        While a map is awaited, all who ask get the same. Its error is an `EngineCoreError` where the engine ends.
        """

    @property
    def figures(self) -> Figures:
        """The latest figures, at most one step or one idle second old."""

    @property
    def last_prefill_step_s(self) -> float:
        """Seconds that the last step with prompt tokens took; infinite before the first one."""

    def step_age_s(self) -> float:
        """Return the seconds since the engine last reported while it has work; 0 while it has none."""

    def close(self) -> None:
        """Give up what is left of the engine."""


class ReportReader:
    """Keeps what an engine's reports say, and passes them on to the callbacks. For the event loop, but for reading."""

    def __init__(self) -> None:
        self._on_outputs: TakeOutputs = lambda _outputs, _tokens: None
        self._on_begun: Callable[[StepBegun], None] = lambda _: None
        self._on_step: Callable[[float, int], None] = lambda _duration_s, _sequences: None
        self._on_outputs_ended: Callable[[], None] = lambda: None
        self._profiles: deque[Future[str]] = deque()
        self._blocks: Future[BlockMap] | None = None
        self._num_commands = 0
        self._waits_since: float | None = None  # on time.monotonic(), while the engine has work
        self.figures: Figures | None = None
        self.last_prefill_step_s = inf

    def listen(
        self,
        on_outputs: TakeOutputs,
        on_begun: Callable[[StepBegun], None],
        on_step: Callable[[float, int], None],
        on_outputs_ended: Callable[[], None],
    ) -> None:
        """Set the callbacks."""
        self._on_outputs, self._on_begun, self._on_step = on_outputs, on_begun, on_step
        self._on_outputs_ended = on_outputs_ended

    def note_command(self, command: Command) -> None:
        """Note a command that is sent: from now on a report is expected."""
        if isinstance(command, AddGroup | AbortSequences):
            self._num_commands += 1
            if self._waits_since is None:
                self._waits_since = time.monotonic()

    def expect_profile(self) -> Future[str]:
        """Return a future for the next answer to `StartProfile`."""
        future: Future[str] = Future()
        self._profiles.append(future)
        return future

    def expect_blocks(self, submit: Callable[[Command], None]) -> Future[BlockMap]:
        """Return a future for the next map of the blocks; submit the command unless one is awaited already."""
        if self._blocks is None:
            self._blocks = Future()
            submit(ReadBlocks())
        return self._blocks

    def step_age_s(self) -> float:
        """See EngineCore. Any thread may call this."""
        since = self._waits_since
        return 0.0 if since is None else time.monotonic() - since

    def handle(self, report: Report) -> None:
        """Keep what a report of a loaded engine says, and pass it on."""
        match report:
            case StepDone():
                self._note(report.figures)
                if report.has_prompts:
                    self.last_prefill_step_s = report.duration_s
                if report.num_sequences:
                    self._on_step(report.duration_s, report.num_sequences)
                if report.outputs or report.tokens.num_tokens:
                    self._on_outputs(report.outputs, report.tokens)
            case StepBegun():
                self._note(report.figures)
                self._on_begun(report)
            case Figures():
                self._note(report)
            case Refused():
                self._on_outputs(report.outputs, NO_TOKENS)
            case ProfileAnswer():
                self._answer(report)
            case BlockMap():
                if self._blocks is not None:
                    self._blocks.set_result(report)
                    self._blocks = None
            case OutputsEnded():
                self._waits_since = None
                self._on_outputs_ended()

    def expect_no_more(self) -> None:
        """Expect no further report."""
        self._waits_since = None
        while self._profiles:
            self._answer(ProfileAnswer(error="the engine has ended"))
        if self._blocks is not None:
            self._blocks.set_exception(EngineCoreError("the engine has ended"))
            self._blocks = None

    def _note(self, figures: Figures) -> None:
        self.figures = figures
        has_work = figures.is_busy or figures.num_commands < self._num_commands
        self._waits_since = time.monotonic() if has_work else None

    def _answer(self, answer: ProfileAnswer) -> None:
        if not self._profiles:
            return
        future = self._profiles.popleft()
        if answer.error:
            future.set_exception(RuntimeError(answer.error))
        else:
            future.set_result(answer.path)


ACKNOWLEDGED_STEPS = STEPS_AHEAD // 2
"""Step reports of one acknowledgement: the engine is woken once for several steps."""


class Acknowledgements:
    """The worker's side: acknowledges every ACKNOWLEDGED_STEPS steps whose reports were taken.

    Args:
        acknowledge: gets their number.
    """

    def __init__(self, acknowledge: Callable[[int], None]) -> None:
        self._acknowledge = acknowledge
        self._num_taken = 0

    def count(self, report: Report) -> None:
        """Count a report that was taken."""
        if isinstance(report, StepDone):
            self._num_taken += 1
            if self._num_taken == ACKNOWLEDGED_STEPS:
                self._num_taken = 0
                self._acknowledge(ACKNOWLEDGED_STEPS)


PROGRAM = "from pagestream_worker.core_process import main; main()"


class Child(Protocol):
    """A started process."""

    @property
    def pid(self) -> int: ...
    def wait(self) -> int:
        """Wait for its end; return its exit code, or the negative number of the signal that ended it."""

    def kill(self) -> None:
        """Kill it, unless it has ended."""


def launch(connection: socket.socket) -> Child:
    """Start the program with a new interpreter, that inherits nothing but its end of a connection.

    To be called on a thread that lives as long as this process: with it the kernel ends the child.
    """
    number = connection.fileno()
    command = [sys.executable, "-P", "-c", PROGRAM, str(number), str(os.getpid())]
    return subprocess.Popen(command, pass_fds=[number], stdin=subprocess.DEVNULL)


def describe_exit(code: int) -> str:
    """Return an exit code in words."""
    if code >= 0:
        return f"exited with code {code}"
    name = signal.Signals(-code).name
    return f"was ended by {name}" + (" (out of memory, or by hand)" if -code == signal.SIGKILL else "")


logger = logging.getLogger(__name__)

T = TypeVar("T")

BUFFER_BYTES = 256 * 1024
"""Of reports that the worker has not read: ten steps of 256 sequences. Then the engine waits, as at STEPS_AHEAD."""
RUNNER_MODULE = "pagestream_engine.runner.runner"
LAST_WORDS_S = 0.1
"""After a process has ended: for what it has sent; and after its end of the connection has closed: for its end."""


class EngineProcess:
    """Starts a process that loads an engine, and steps it while it has work. An `EngineCore`.

    Both die together: the process when the worker's dies, and its own death ends `ended` with the reason.

    Methods: those of an EngineCore, and one for each thing that its connection and its process may do.

    Args:
        program: for the process; None: it comes by `load`.
    """

    def __init__(self, program: Program | None) -> None:
        self.loaded: Future[EngineFacts] = Future()
        self.ended: Future[None] = Future()
        self._program = program
        self._reader = ReportReader()
        self._acknowledgements = Acknowledgements(lambda count: self._send(StepsTaken(count)))
        self._child: Child | None = None
        self._transport: asyncio.WriteTransport | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._exit_code: int | None = None
        self.exited = asyncio.Event()
        """Set when the process is gone and its memory is free."""
        self.asleep: Future[None] = Future()
        """Done once the engine sleeps, with EngineCoreError where it could not; of the last `fall_asleep`."""
        self._awoken: Future[float] | None = None
        self._inspected: dict[str, asyncio.Future[ModelInspected]] = {}
        self._is_closed = False

    @property
    def pid(self) -> int:
        """Id of the process; 0 before its start."""
        return self._child.pid if self._child is not None else 0

    async def start(self, *, load: bool = True) -> None:
        """Start the process, on the main thread. It imports its modules, and waits for `load` where that is False;
        `loaded` gets its answer.
        """
        loop = self._loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        with theirs:
            started = self._child = launch(theirs)
        threading.Thread(target=self._wait, args=(started, loop), name="engine's process", daemon=True).start()
        transport, _ = await loop.create_unix_connection(
            lambda: _Reports(self._take, self._unreadable, self._lost), sock=ours
        )
        self._transport = cast(asyncio.WriteTransport, transport)
        self._send(Start(sys.path))
        if load and self._program is not None:
            self.load()
        else:
            self._send(Preload(RUNNER_MODULE))

    def load(self, program: Program | None = None) -> None:
        """See EngineCore.

        Args:
            program: for a process that was made without one.
        """
        self._program = program or self._program
        self._send(self._program)

    async def inspect(self, source: str) -> ModelInspected:
        """Return what the configuration and the headers of another model say.

        Raises:
            EngineCoreError: the process has ended.
        """
        if self.ended.done():
            raise EngineCoreError("the engine's process has ended")
        answer = self._inspected.get(source)
        if answer is None:
            answer = self._inspected[source] = asyncio.get_running_loop().create_future()
            self._send(InspectModel(source))
        return await asyncio.shield(answer)  # of one that was given up, the next waiter gets the answer

    def listen(
        self,
        *,
        on_outputs: TakeOutputs,
        on_begun: Callable[[StepBegun], None],
        on_step: Callable[[float, int], None],
        on_outputs_ended: Callable[[], None] = lambda: None,
    ) -> None:
        """See EngineCore."""
        self._reader.listen(on_outputs, on_begun, on_step, on_outputs_ended)

    def submit(self, command: Command) -> None:
        """See EngineCore."""
        if not self.ended.done():
            self._reader.note_command(command)
            self._send(command)

    def fall_asleep(self) -> None:
        """See EngineCore. `asleep` gets the answer."""
        self.asleep = Future()
        if self.ended.done():
            self.asleep.set_exception(EngineCoreError("the engine's process has ended"))
        self.submit(FallAsleep())

    def wake_up(self) -> Future[float]:
        """Let an engine that sleeps be as after its load.

        Returns:
            The seconds that it has taken; EngineCoreError where it can't, or has ended.
        """
        self._awoken = awoken = Future[float]()
        if self.ended.done():
            awoken.set_exception(EngineCoreError("the engine's process has ended"))
        else:
            self._send(WakeUp())
        return awoken

    def request_profile(self, steps: int) -> str:
        """See EngineCore."""
        if self._loop is None or not self.loaded.done() or self.ended.done():
            raise RuntimeError("no profile is written: the engine does not run")
        answer = asyncio.run_coroutine_threadsafe(self._profile(steps), self._loop)
        try:
            return answer.result(PROFILE_LIMIT_S)
        except TimeoutError as error:
            answer.cancel()
            raise RuntimeError(f"the engine's process has not answered within {PROFILE_LIMIT_S:g} s") from error

    def read_blocks(self) -> Future[BlockMap]:
        """See EngineCore."""
        return self._reader.expect_blocks(self.submit)

    @property
    def figures(self) -> Figures:
        """See EngineCore."""
        return self._reader.figures or Figures.at_start(self.loaded.result(timeout=0))

    @property
    def last_prefill_step_s(self) -> float:
        """See EngineCore."""
        return self._reader.last_prefill_step_s

    def step_age_s(self) -> float:
        """See EngineCore."""
        return self._reader.step_age_s()

    def close(self) -> None:
        """See EngineCore. A process that still runs is killed."""
        self._is_closed = True
        if self._transport is not None:
            self._transport.close()
        if self._child is not None:
            self._child.kill()

    async def _profile(self, steps: int) -> str:
        self._send(StartProfile(steps))
        return await asyncio.wrap_future(self._reader.expect_profile())

    def _send(self, message: object) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(COMMANDS.pack(message))

    # -- from the process --

    def _take(self, report: Report) -> None:
        if self.ended.done():
            return
        match report:
            case Loaded():
                self.loaded.set_result(report.facts)
            case LoadFailed():
                self._end(_load_error(report))
            case Ended():
                error = EngineCoreError(report.error, is_link_lost=report.is_link_lost)
                self._end(error if report.error else None)
            case ModelInspected():
                self._inspected.pop(report.source).set_result(report)
            case FellAsleep():
                _settle(self.asleep, None, report.error)
            case Awoken():
                if self._awoken is not None:
                    _settle(self._awoken, report.duration_s, report.error)
            case _:
                self._reader.handle(report)
                self._acknowledgements.count(report)

    # -- its end --

    def _unreadable(self, error: MessageError) -> None:
        """End a process that sends what is no report: nothing after it can be read."""
        if not self.ended.done():
            logger.critical("the engine's process sent what can't be read: %s", error, extra={"pid": self.pid})
            self._end(EngineCoreError(f"the engine's process {self.pid} sent what can't be read: {error}"))
        self.close()

    def _wait(self, started: Child, loop: asyncio.AbstractEventLoop) -> None:
        code = started.wait()
        if not loop.is_closed():
            loop.call_soon_threadsafe(self._exited, code)

    def _exited(self, code: int) -> None:
        """Note the exit code. What the process has sent may be unread: its connection then ends a moment later."""
        self._exit_code = code
        self.exited.set()
        if self._transport is None or self._transport.is_closing():
            self._died()
        elif not self.ended.done():
            asyncio.get_running_loop().call_later(LAST_WORDS_S, self._died)

    def _lost(self) -> None:
        """Note the end of the connection. The exit code follows, unless the process closed it and lives."""
        if self._exit_code is not None:
            self._died()
        elif not self.ended.done():
            asyncio.get_running_loop().call_later(LAST_WORDS_S, self._died)

    def _died(self) -> None:
        if self.ended.done():
            return
        how = "closed its connection" if self._exit_code is None else describe_exit(self._exit_code)
        if not self._is_closed:
            extra = {"pid": self.pid, "exit_code": self._exit_code}
            logger.critical("the engine's process %s", how, extra=extra)
        self._end(EngineCoreError(f"the engine's process {self.pid} {how}"))

    def _end(self, error: Exception | None) -> None:
        self._reader.expect_no_more()
        for answer in self._inspected.values():
            answer.set_exception(EngineCoreError("the engine's process has ended"))
            answer.exception()  # its waiter may have given up
        for waiting in (self.loaded, self.asleep, self._awoken):
            if waiting is not None and not waiting.done():
                waiting.set_exception(error or EngineCoreError("the engine's process has ended"))
        if error is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(error)


def _settle(future: Future[T], result: T, error: str) -> None:
    if error:
        future.set_exception(EngineCoreError(error))
    else:
        future.set_result(result)


def _load_error(report: LoadFailed) -> Exception:
    if report.is_permanent:
        return ModelError(report.error)
    return EngineError(report.error) if report.is_option else EngineCoreError(report.error)


class _Reports(asyncio.Protocol):
    """Receives reports on the event loop."""

    def __init__(
        self, take: Callable[[Report], None], unreadable: Callable[[MessageError], None], lost: Callable[[], None]
    ) -> None:
        self._take, self._unreadable, self._lost = take, unreadable, lost
        self._frames = Frames(REPORTS)

    def data_received(self, data: bytes) -> None:
        try:
            for report in self._frames.feed(data):
                self._take(report)
        except MessageError as error:
            self._unreadable(error)

    def connection_lost(self, error: Exception | None) -> None:
        self._lost()


class EngineThread(threading.Thread):
    """Creates an engine, and steps it while it has work. An `EngineCore`.

    Args:
        make_engine: loads the model; `loaded` gets its result or its error.
        profiler: for profiles on demand; None: there are none.
        add_limit_s: see `StepLoop`.
    """

    def __init__(
        self, make_engine: Callable[[], Engine], profiler: StepProfiler | None = None, add_limit_s: float = ADD_LIMIT_S
    ) -> None:
        super().__init__(name="engine", daemon=True)
        self._add_limit_s = add_limit_s
        self.loaded: Future[EngineFacts] = Future()
        self.ended: Future[None] = Future()
        self._make_engine = make_engine
        self._profiler = profiler
        self._commands = CommandQueue()
        self._reader = ReportReader()
        self._steps_ahead = StepsAhead()
        self._acknowledgements = Acknowledgements(self._steps_ahead.note_taken)
        self._loop: asyncio.AbstractEventLoop | None = None

    def load(self) -> None:
        """See EngineCore."""
        self.start()

    def listen(
        self,
        *,
        on_outputs: TakeOutputs,
        on_begun: Callable[[StepBegun], None],
        on_step: Callable[[float, int], None],
        on_outputs_ended: Callable[[], None] = lambda: None,
    ) -> None:
        """See EngineCore."""
        self._loop = asyncio.get_running_loop()
        self._reader.listen(on_outputs, on_begun, on_step, on_outputs_ended)

    def submit(self, command: Command) -> None:
        """See EngineCore."""
        if isinstance(command, StartProfile | InspectModel):
            raise TypeError(f"a thread takes no {type(command).__name__}")
        self._reader.note_command(command)
        self._commands.put(command)

    def fall_asleep(self) -> None:
        """See EngineCore."""
        self.submit(FallAsleep())

    def request_profile(self, steps: int) -> str:
        """See EngineCore."""
        answer = answer_profile(self._profiler, steps)
        if answer.error:
            raise RuntimeError(answer.error)
        return answer.path

    def read_blocks(self) -> Future[BlockMap]:
        """See EngineCore."""
        return self._reader.expect_blocks(self.submit)

    @property
    def figures(self) -> Figures:
        """See EngineCore."""
        return self._reader.figures or Figures.at_start(self.loaded.result(timeout=0))

    @property
    def last_prefill_step_s(self) -> float:
        """See EngineCore."""
        return self._reader.last_prefill_step_s

    def step_age_s(self) -> float:
        """See EngineCore."""
        return self._reader.step_age_s()

    def close(self) -> None:
        """See EngineCore. The thread ends after its step, or with the process."""
        self._commands.put(Stop())
        self._steps_ahead.lift()

    def run(self) -> None:
        """Load, then step until `Stop`."""
        try:
            engine = self._make_engine()
            facts = EngineFacts.of(engine)
        except BaseException as error:  # noqa: BLE001 - raised by `loaded`
            self.loaded.set_exception(_as_exception(error))
            self.ended.set_exception(_as_exception(error))
            return
        self.loaded.set_result(facts)
        loop = StepLoop(
            engine,
            self._commands,
            self._report,
            profiler=self._profiler,
            before_marked_step=lambda: reach(FaultPoint.PREFILL),
            add_limit_s=self._add_limit_s,
        )
        try:
            loop.run()
            engine.close()
        except BaseException as error:  # noqa: BLE001 - raised by `ended`
            self.ended.set_exception(_as_exception(error))
        else:
            self.ended.set_result(None)

    def _report(self, report: Report) -> None:
        """Pass a report on. Blocks while the event loop has not taken the last STEPS_AHEAD steps."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._take, report)
            self._steps_ahead.wait(report)

    def _take(self, report: Report) -> None:
        self._acknowledgements.count(report)  # first: a callback's error is logged, and must not stop the engine
        self._reader.handle(report)


def _as_exception(error: BaseException) -> Exception:
    """Wrap what is no Exception, such as the panic of a library in Rust: it must end the worker, not pass it by."""
    if isinstance(error, Exception):
        return error
    ended = RuntimeError(f"the engine's thread was ended by {type(error).__name__}: {error}")
    ended.__cause__ = error
    return ended
