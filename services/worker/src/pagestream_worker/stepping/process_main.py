"""The program of an engine's process, titled `pagestream-engine-core`.

The main thread loads the model and steps it; a second thread reads commands. It imports nothing that talks to Redis.
"""

import importlib
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagestream_engine.config import EngineConfig
from pagestream_engine.engine import Engine
from pagestream_engine.errors import EngineError
from pagestream_engine.executor.child import die_with_parent
from pagestream_telemetry.logs import configure_logs
from pagestream_telemetry.settings import TelemetrySettings
from setproctitle import setproctitle

from pagestream_worker.stepping import wire
from pagestream_worker.stepping.commands import InspectModel, StartProfile
from pagestream_worker.stepping.engine_core import is_link_lost
from pagestream_worker.stepping.loading import inspect_model, is_permanent
from pagestream_worker.stepping.profiler import StepProfiler, answer_profile
from pagestream_worker.stepping.reports import Ended, EngineFacts, Loaded, LoadFailed, Report
from pagestream_worker.stepping.step_loop import CommandQueue, StepLoop
from pagestream_worker.stepping.steps_ahead import StepsAhead, StepsTaken

logger = logging.getLogger(__name__)

TITLE = "pagestream-engine-core"
EXIT_FAILED = 1
_READ_BYTES = 1 << 18
_FAULT_POINTS = "PAGESTREAM_FAULT_POINTS"


@dataclass(frozen=True)
class Program:
    """What the process is told after its start."""

    make_engine: Callable[[], Engine]
    """Picklable: a function of a module, or a partial of one."""
    telemetry: TelemetrySettings
    """For its logs."""
    engine_id: str
    """For the names of profiles."""
    profile_dir: Path | None
    """Folder for profiles; None: there are none."""
    config: EngineConfig | None = None
    """That other models are inspected for; None: none are."""


@dataclass(frozen=True)
class Preload:
    """What the process of a standby is told before its program."""

    module: str
    """To be imported, with torch and whatever else that needs."""


class Connection:
    """This process' end of the connection to its worker."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._frames = wire.Frames()
        self._received: list[bytes] = []
        self._sending = threading.Lock()
        self._steps_ahead = StepsAhead()

    def read(self) -> Any:
        """Wait for the next message. Exit the process where the worker has closed the connection, or is dead."""
        while not self._received:
            data = self._socket.recv(_READ_BYTES)
            if not data:
                os._exit(0)
            self._received.extend(self._frames.feed(data))
        return wire.unpack(self._received.pop(0))

    def report(self, report: Report) -> None:
        """Send a report. Blocks while the worker has not taken the last STEPS_AHEAD steps, or the buffer is full.

        Both last until the worker reads, or its end of the connection closes: that ends this process (see `read`).
        """
        message = wire.pack(report)
        with self._sending:
            self._socket.sendall(message)
        self._steps_ahead.wait(report)

    def note_taken(self, num_steps: int) -> None:
        """Note that the worker has taken the reports of further steps."""
        self._steps_ahead.note_taken(num_steps)


class Commands(threading.Thread):
    """Reads commands until the process ends."""

    def __init__(
        self, connection: Connection, queue: CommandQueue, profiler: StepProfiler | None, config: EngineConfig | None
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
        config = self._config
        if config is None:
            raise RuntimeError("a model is to be inspected, and no configuration was given")

        def answer() -> None:
            self._connection.report(inspect_model(source, config, is_deterministic=self.is_deterministic))

        threading.Thread(target=answer, name="inspect a model", daemon=True).start()


def run(connection: Connection, program: Program) -> int:
    """Load and step the engine; return the exit code."""
    queue = CommandQueue()
    profiler = None if program.profile_dir is None else StepProfiler(program.profile_dir, program.engine_id)
    commands = Commands(connection, queue, profiler, program.config)
    commands.start()
    try:
        engine = program.make_engine()
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
        connection.report(Ended(_in_words(error), is_link_lost=is_link_lost(error)))
        return EXIT_FAILED
    connection.report(Ended())
    return 0


def serve(end: socket.socket, parent: int) -> None:
    """Run what the worker at the other end asks for, then exit the process. Never returns."""
    setproctitle(TITLE)
    # Signals to a whole group or container are the worker's: it ends this process when the last step has run.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    die_with_parent(parent)
    connection = Connection(end)
    sys.path[:] = connection.read()
    message = connection.read()
    if isinstance(message, Preload):
        importlib.import_module(message.module)
        message = connection.read()
    program: Program = message
    configure_logs(program.telemetry)
    code = EXIT_FAILED
    try:
        code = run(connection, program)
    except OSError as error:  # the worker has gone
        logger.info("the worker has closed the connection: %s", error)
    finally:
        logging.shutdown()
        os._exit(code)  # nothing is left to be done, and what libraries do at an exit takes a second


def _in_words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _fault_point() -> Callable[[], None]:
    """Return what passes the fault point of a step; without a harness nothing of the broker's code is imported."""
    if _FAULT_POINTS not in os.environ:
        return lambda: None
    from pagestream_streams.fault_points import FaultPoint, reach

    return lambda: reach(FaultPoint.PREFILL)


def main() -> None:
    """Run the program that `child.launch` starts: the arguments are a descriptor and the worker's process id."""
    serve(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))
