"""An engine in a process of its own: the same tokens, and every way in which it can end."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
from pagestream_engine import Engine, EngineConfig, SamplingParams, Sibling, StepOutput
from pagestream_engine.errors import ConfigError, EngineError, RankLost
from pagestream_engine.step.pending import PendingResult
from pagestream_engine.step.records import StepPlan
from pagestream_telemetry.settings import TelemetrySettings
from pagestream_worker.logs.token_columns import TokenColumns
from pagestream_worker.stepping.commands import AddGroup, Stop
from pagestream_worker.stepping.engine_core import EngineCoreError, is_link_lost
from pagestream_worker.stepping.engine_process import EngineProcess
from pagestream_worker.stepping.process_main import TITLE, Program
from pagestream_worker.stepping.steps_ahead import STEPS_AHEAD
from support.engines.arithmetic_model import make_folder, undisturbed
from support.engines.arithmetic_worker import FACTS, ArithmeticRunner, SlowRunner, arithmetic_engine
from support.processes.waiting import is_running, until, wait_until

LIMIT_S = 60.0
PARAMS = SamplingParams(max_tokens=20, ignore_eos=True)
ENDLESS = SamplingParams(max_tokens=None, ignore_eos=True)
PROMPT = [1, 2, 3]


class ExitingRunner(ArithmeticRunner):
    """Ends its process in the third step, as a library might."""

    def execute(self, plan: StepPlan) -> PendingResult:
        if self.num_steps == 2:
            raise SystemExit("a library has had enough")
        return super().execute(plan)


class CrashingRunner(ArithmeticRunner):
    """Ends its process in the third step, without a word."""

    def execute(self, plan: StepPlan) -> PendingResult:
        if self.num_steps == 2:
            os._exit(7)
        return super().execute(plan)


class SilentRunner(ArithmeticRunner):
    """Loses another machine in the third step."""

    def execute(self, plan: StepPlan) -> PendingResult:
        if self.num_steps == 2:
            raise RankLost(1, 2, "sent nothing for 1.5 s", is_link_lost=True)
        return super().execute(plan)


def refused_load() -> Engine:
    """Load as with a wrong option."""
    raise ConfigError("block_size", 3, "a power of two")


def broken_load() -> Engine:
    """Load as with a broken library."""
    raise ImportError("libtorch.so is cut off")


def is_asleep(pid: int) -> Callable[[], bool]:
    """Return whether a process waits, and has not computed since the last call."""
    seen = [""]

    def look() -> bool:
        state, *figures = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        before, seen[0] = seen[0], "/".join(figures[10:12])  # user and system time
        return state == "S" and seen[0] == before

    return look


def title(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text().strip("\0")


class Owner:
    """The event loop's side of a process."""

    def __init__(self, process: EngineProcess) -> None:
        self.process = process
        self.outputs: list[StepOutput] = []
        process.listen(on_outputs=self._take, on_begun=lambda _: None, on_step=lambda *_: None)

    def _take(self, outputs: Sequence[StepOutput], _: TokenColumns) -> None:
        self.outputs += outputs

    async def ended(self) -> None:
        async with asyncio.timeout(LIMIT_S):
            await asyncio.wrap_future(self.process.ended)


@asynccontextmanager
async def running(folder: Path, runner: type[ArithmeticRunner] = ArithmeticRunner) -> AsyncIterator[Owner]:
    make_engine = partial(arithmetic_engine, make_folder(folder), EngineConfig(), runner)
    process = EngineProcess(Program(make_engine, TelemetrySettings(), "e", None))
    await process.start()
    try:
        async with asyncio.timeout(LIMIT_S):
            await asyncio.wrap_future(process.loaded)
        yield Owner(process)
    finally:
        process.close()


async def test_it_computes_the_same_tokens_and_stops_when_asked(tmp_path: Path) -> None:
    async with running(tmp_path) as owner:
        facts = owner.process.loaded.result(0)
        assert (facts.vocab_size, facts.kv_layout.block_size, dict(facts.memory_bytes)) == (FACTS.vocab_size, 16, {})
        assert title(owner.process.pid) == TITLE
        owner.process.submit(AddGroup(PROMPT, [Sibling("a", PARAMS)]))
        owner.process.submit(AddGroup([FACTS.vocab_size], [Sibling("bad", PARAMS)]))
        await until(lambda: len(owner.outputs) == 21, "all outputs")
        assert owner.process.figures.num_commands == 2
        os.kill(owner.process.pid, signal.SIGTERM)  # to the whole group, of which the worker decides the end
        owner.process.submit(Stop())
        await owner.ended()
        wait_until(lambda: not is_running(owner.process.pid), "its end", LIMIT_S)
    tokens = [output.token_id for output in owner.outputs if output.seq_id == "a"]
    assert tokens == undisturbed(PROMPT, PARAMS, FACTS, 100)
    [refused] = [output for output in owner.outputs if output.seq_id == "bad"]
    assert refused.error is not None
    assert "vocabulary" in refused.error


async def test_a_killed_process_is_noticed_with_its_reason_after_its_last_outputs(tmp_path: Path) -> None:
    async with running(tmp_path, SlowRunner) as owner:
        owner.process.submit(AddGroup(PROMPT, [Sibling("a", ENDLESS)]))
        await until(lambda: len(owner.outputs) > 3, "some outputs")
        os.kill(owner.process.pid, signal.SIGKILL)
        with pytest.raises(EngineCoreError, match=r"was ended by SIGKILL \(out of memory, or by hand\)"):
            await owner.ended()
        count = len(owner.outputs)
        owner.process.submit(Stop())  # nobody is there
    whole = undisturbed(PROMPT, ENDLESS, FACTS, 4096)
    assert [output.token_id for output in owner.outputs] == whole[:count]


async def test_it_waits_for_a_worker_that_takes_no_reports(tmp_path: Path) -> None:
    """A worker that is stopped, or starved, must not find that its engine has finished what it shows as running."""
    async with running(tmp_path) as owner:
        owner.process.submit(AddGroup(PROMPT, [Sibling("a", ENDLESS)]))
        await until(lambda: len(owner.outputs) > STEPS_AHEAD, "steps that were taken")
        before = len(owner.outputs)
        wait_until(is_asleep(owner.process.pid), "the engine to wait for this event loop", LIMIT_S)
        os.kill(owner.process.pid, signal.SIGKILL)
        with pytest.raises(EngineCoreError):
            await owner.ended()
    assert before < len(owner.outputs) <= before + STEPS_AHEAD


@pytest.mark.parametrize(
    ("runner", "reason"),
    [
        (ExitingRunner, "SystemExit: a library has had enough"),
        (CrashingRunner, "exited with code 7"),
        (SilentRunner, "sent nothing for 1.5 s"),
    ],
)
async def test_a_process_that_ends_itself_says_why(tmp_path: Path, runner: type[ArithmeticRunner], reason: str) -> None:
    async with running(tmp_path, runner) as owner:
        owner.process.submit(AddGroup(PROMPT, [Sibling("a", PARAMS)]))
        with pytest.raises(EngineCoreError, match=reason) as caught:
            await owner.ended()
        assert len(owner.outputs) == 2
        assert is_link_lost(caught.value) == (runner is SilentRunner)


@pytest.mark.parametrize(
    ("load", "error", "words"),
    [(refused_load, EngineError, "block_size: given 3"), (broken_load, EngineCoreError, "ImportError: libtorch")],
)
async def test_the_error_of_a_load_is_the_futures(load: object, error: type[Exception], words: str) -> None:
    process = EngineProcess(Program(load, TelemetrySettings(), "e", None))  # type: ignore[arg-type]
    await process.start()
    try:
        async with asyncio.timeout(LIMIT_S):
            with pytest.raises(error, match=words) as caught:
                await asyncio.wrap_future(process.loaded)
        assert isinstance(caught.value, EngineError) == (error is EngineError)
    finally:
        process.close()


PARENT = """
import asyncio, sys, time
from functools import partial
from pathlib import Path
from pagestream_engine import EngineConfig
from pagestream_telemetry.settings import TelemetrySettings
from pagestream_worker.stepping.engine_process import EngineProcess
from pagestream_worker.stepping.process_main import Program
from support.engines.arithmetic_worker import SlowRunner, arithmetic_engine

async def main():
    make_engine = partial(arithmetic_engine, Path(sys.argv[1]), EngineConfig(), SlowRunner)
    process = EngineProcess(Program(make_engine, TelemetrySettings(), "e", None))
    await process.start()
    await asyncio.wrap_future(process.loaded)
    print(process.pid, flush=True)
    time.sleep(60)

asyncio.run(main())
"""


@pytest.mark.parametrize("is_stopped", [False, True])
def test_it_dies_with_its_worker(tmp_path: Path, is_stopped: bool) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", PARENT, str(make_folder(tmp_path))]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        if is_stopped:
            os.kill(pid, signal.SIGSTOP)
        parent.kill()
    wait_until(lambda: not is_running(pid), "its end", LIMIT_S)
