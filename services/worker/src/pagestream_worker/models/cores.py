"""Starts the engines of a process: its first, and a new one for each model that follows."""

import asyncio
from functools import partial

from pagestream_worker.collector import spare_what_lives
from pagestream_worker.settings import ProcessSettings
from pagestream_worker.standby import IMPORTED
from pagestream_worker.stepping.engine_core import EngineCore
from pagestream_worker.stepping.engine_process import EngineProcess
from pagestream_worker.stepping.engine_thread import EngineThread
from pagestream_worker.stepping.loading import EngineFactory, load_engine
from pagestream_worker.stepping.process_main import Program
from pagestream_worker.stepping.profiler import StepProfiler


class Cores:
    """The engine that runs, and the one that is about to.

    Args:
        make_engine: makes the engine; picklable where it gets a process of its own.
    """

    def __init__(self, settings: ProcessSettings, make_engine: EngineFactory) -> None:
        self._settings = settings
        self._make_engine = make_engine
        self._prepared: EngineProcess | None = None
        self._preparing = asyncio.Lock()
        self.current: EngineCore | None = None
        """The last one that was told to load a model."""

    async def start(self) -> EngineCore:
        """Start the engine of the model that the process begins with."""
        worker = self._settings.worker
        program = self._program(worker.model)
        if worker.engine_core == "process":
            process = EngineProcess(program)
            self.current = process
            await process.start(load=worker.standby != IMPORTED)
            spare_what_lives()
            return process
        profiler = None if worker.profile_dir is None else StepProfiler(worker.profile_dir, worker.engine_id)
        thread = EngineThread(program.make_engine, profiler)
        self.current = thread
        if worker.standby != IMPORTED:
            thread.load()
        return thread

    async def prepare(self) -> None:
        """Start a process that imports what an engine needs, while another one may still run; also where the one that
        was prepared has ended.
        """
        async with self._preparing:
            if self._prepared is not None and self._prepared.ended.done():
                self._prepared.close()
                self._prepared = None
            if self._prepared is None:
                self._prepared = EngineProcess(None)
                await self._prepared.start(load=False)

    async def load(self, source: str) -> EngineProcess:
        """Have the prepared process load a model."""
        await self.prepare()
        process, self._prepared = self._prepared, None
        if process is None:  # only for the type: `prepare` has just set it
            raise RuntimeError("no process was prepared")
        self.current = process
        process.load(self._program(source))
        return process

    def request_profile(self, steps: int) -> str:
        """Profile the next steps of the engine that runs. See EngineCore."""
        if self.current is None:
            raise RuntimeError("no profile is written: no engine runs")
        return self.current.request_profile(steps)

    def close(self) -> None:
        """Give up what is left of all engines."""
        for each in (self._prepared, self.current):
            if each is not None:
                each.close()

    def _program(self, source: str) -> Program:
        settings = self._settings
        load = partial(load_engine, self._make_engine, source, settings.engine)
        worker = settings.worker
        return Program(load, settings.telemetry, worker.engine_id, worker.profile_dir, settings.engine)
