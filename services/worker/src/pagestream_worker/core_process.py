"""The program of an engine's process, titled `pagestream-engine-core`.

The main thread loads the model and steps it; a second thread reads commands. It imports nothing that talks to Redis.
"""

import gc
import importlib
import logging
import os
import signal
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable
from pkgutil import resolve_name
from typing import Any

from pagestream_engine.config import EngineConfig
from pagestream_engine.engine import Engine
from pagestream_engine.errors import ConfigError, EngineError, ModelError, ModelNotFound, RankLost, UnsupportedModel
from pagestream_engine.executor.child import die_with_parent
from pagestream_engine.models.folder import model_revision, resolve_model
from pagestream_engine.models.tokenizer import load_tokenizer
from pagestream_engine.wire.codec import Frames
from pagestream_engine.wire.worker import (
    COMMANDS,
    REPORTS,
    Ended,
    EngineFacts,
    InspectModel,
    Loaded,
    LoadFailed,
    ModelFacts,
    ModelInspected,
    Preload,
    Program,
    Report,
    StartProfile,
    StepsTaken,
)
from pagestream_telemetry.logs import configure_logs
from pagestream_telemetry.settings import TelemetrySettings
from setproctitle import setproctitle

from pagestream_worker.profiler import StepProfiler, answer_profile
from pagestream_worker.step_loop import CommandQueue, StepLoop, StepsAhead

logger = logging.getLogger(__name__)

TITLE = "pagestream-engine-core"
EXIT_FAILED = 1
_READ_BYTES = 1 << 18
_FAULT_POINTS = "PAGESTREAM_FAULT_POINTS"


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


def is_permanent(error: EngineError) -> bool:
    """Return whether files or options are at fault, so that no later attempt can succeed with the same ones.

    A file that can't be read, a repository that can't be reached and a machine without memory may be well again.
    """
    if isinstance(error, ModelNotFound):
        return error.__cause__ is None  # else the repository was asked for, in vain
    cause = error.__cause__ or error.__context__
    is_storage = isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError)
    return isinstance(error, ModelError | ConfigError) and not is_storage


YOUNG_OBJECTS = 20_000
"""Between two collections; a few MB. Python's 700 are less than a step of 256 sequences makes."""


def spare_what_lives() -> None:
    """Exclude all objects from garbage collection that there are now, and collect young ones less often.

    Call it when what lives as long as the process has been loaded: a collection that walks it would be a pause between
    two tokens. A step makes few cycles, but thousands of short-lived objects a second.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS)
