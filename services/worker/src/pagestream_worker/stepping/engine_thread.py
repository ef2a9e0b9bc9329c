"""An engine on a thread of the worker's process, apart from the event loop that talks to Redis.

The engine is created and used by this thread alone: OpenMP gives each computing thread its own team of threads, and
two teams compete for the cores (measured on two cores: 1,230 tokens a second, and 1,050 where another thread had loaded
the model).
"""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future

from pagestream_engine.engine import Engine
from pagestream_engine.kv_cache.inspection import BlockMap
from pagestream_streams.fault_points import FaultPoint, reach

from pagestream_worker.stepping.commands import Command, FallAsleep, InspectModel, StartProfile, Stop
from pagestream_worker.stepping.engine_core import ReportReader, TakeOutputs
from pagestream_worker.stepping.profiler import StepProfiler, answer_profile
from pagestream_worker.stepping.reports import EngineFacts, Figures, Report, StepBegun
from pagestream_worker.stepping.step_loop import CommandQueue, StepLoop
from pagestream_worker.stepping.steps_ahead import Acknowledgements, StepsAhead


class EngineThread(threading.Thread):
    """Creates an engine, and steps it while it has work. An `EngineCore`.

    Args:
        make_engine: loads the model; `loaded` gets its result or its error.
        profiler: for profiles on demand; None: there are none.
    """

    def __init__(self, make_engine: Callable[[], Engine], profiler: StepProfiler | None = None) -> None:
        super().__init__(name="engine", daemon=True)
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
        self._acknowledgements.note(report)  # first: a callback's error is logged, and must not stop the engine
        self._reader.take(report)


def _as_exception(error: BaseException) -> Exception:
    """Wrap what is no Exception, such as the panic of a library in Rust: it must end the worker, not pass it by."""
    if isinstance(error, Exception):
        return error
    ended = RuntimeError(f"the engine's thread was ended by {type(error).__name__}: {error}")
    ended.__cause__ = error
    return ended
