"""An engine in a process of its own, which shares no interpreter lock with the event loop that talks to Redis."""

import asyncio
import logging
import socket
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar, cast

from pagestream_engine.errors import EngineError, ModelError
from pagestream_engine.kv_cache.inspection import BlockMap

from pagestream_worker.stepping import child, wire
from pagestream_worker.stepping.commands import Command, FallAsleep, InspectModel, StartProfile, WakeUp
from pagestream_worker.stepping.engine_core import PROFILE_LIMIT_S, EngineCoreError, ReportReader, TakeOutputs
from pagestream_worker.stepping.process_main import Preload, Program
from pagestream_worker.stepping.reports import (
    Awoken,
    Ended,
    EngineFacts,
    FellAsleep,
    Figures,
    Loaded,
    LoadFailed,
    ModelInspected,
    Report,
    StepBegun,
)
from pagestream_worker.stepping.steps_ahead import Acknowledgements, StepsTaken

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
        self._child: child.Child | None = None
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
            started = self._child = child.launch(theirs)
        threading.Thread(target=self._wait, args=(started, loop), name="engine's process", daemon=True).start()
        transport, _ = await loop.create_unix_connection(lambda: _Reports(self._take, self._lost), sock=ours)
        self._transport = cast(asyncio.WriteTransport, transport)
        self._send(sys.path)
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
            self._transport.write(wire.pack(message))

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
                self._reader.take(report)
                self._acknowledgements.note(report)

    # -- its end --

    def _wait(self, started: child.Child, loop: asyncio.AbstractEventLoop) -> None:
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
        how = "closed its connection" if self._exit_code is None else child.describe_exit(self._exit_code)
        if not self._is_closed:
            extra = {"pid": self.pid, "exit_code": self._exit_code}
            logger.critical("the engine's process %s", how, extra=extra)
        self._end(EngineCoreError(f"the engine's process {self.pid} {how}"))

    def _end(self, error: Exception | None) -> None:
        self._reader.end()
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

    def __init__(self, take: Callable[[Report], None], lost: Callable[[], None]) -> None:
        self._take, self._lost = take, lost
        self._frames = wire.Frames()

    def data_received(self, data: bytes) -> None:
        for body in self._frames.feed(data):
            self._take(wire.unpack(body))

    def connection_lost(self, error: Exception | None) -> None:
        self._lost()
