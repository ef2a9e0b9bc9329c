"""An engine on a thread: its facts or the error of its load, its reports on the event loop, its end."""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from pagestream_engine import Engine, EngineConfig, SamplingParams, Sibling, StepOutput
from pagestream_engine.step.pending import PendingResult
from pagestream_engine.step.records import StepPlan
from pagestream_worker.logs.token_columns import TokenColumns
from pagestream_worker.stepping.commands import AddGroup, Stop
from pagestream_worker.stepping.engine_thread import EngineThread
from pagestream_worker.stepping.steps_ahead import STEPS_AHEAD
from support.engines.arithmetic_model import ArithmeticFacts, ArithmeticRunner, make_folder, undisturbed
from support.processes.waiting import until, wait_until

LIMIT_S = 10.0
FACTS = ArithmeticFacts()
PARAMS = SamplingParams(max_tokens=20, ignore_eos=True)
ENDLESS = SamplingParams(max_tokens=None, ignore_eos=True)
LOOKS = 10


class BrokenRunner(ArithmeticRunner):
    """Fails from its third step on."""

    def execute(self, plan: StepPlan) -> PendingResult:
        if self.num_steps == 2:
            raise MemoryError("no memory for the step")
        return super().execute(plan)


def is_asleep(thread: threading.Thread) -> Callable[[], bool]:
    """Return whether a thread has not computed since the last LOOKS calls."""
    assert thread.ident is not None
    clock = time.pthread_getcpuclockid(thread.ident)
    seen: deque[float] = deque(maxlen=LOOKS)

    def look() -> bool:
        seen.append(time.clock_gettime(clock))
        return len(seen) == LOOKS and seen[0] == seen[-1]

    return look


class Owner:
    """The event loop's side of a thread."""

    def __init__(self, folder: Path, runner: type[ArithmeticRunner] = ArithmeticRunner) -> None:
        def make_engine() -> Engine:
            made_on.append(threading.current_thread())
            return Engine(make_folder(folder), EngineConfig(), make_runner=make_runner)

        def make_runner(_: Path, config: EngineConfig) -> ArithmeticRunner:
            self.runner = runner(config, FACTS)
            return self.runner

        made_on: list[threading.Thread] = []
        self.outputs: list[StepOutput] = []
        self.steps: list[int] = []
        self.thread = EngineThread(make_engine)
        self.thread.start()
        assert self.thread.loaded.result(LIMIT_S).vocab_size == FACTS.vocab_size
        assert made_on == [self.thread]
        self.thread.listen(
            on_outputs=self._take, on_begun=lambda _: None, on_step=lambda _, sequences: self.steps.append(sequences)
        )

    def _take(self, outputs: Sequence[StepOutput], _: TokenColumns) -> None:
        assert threading.current_thread() is threading.main_thread()
        self.outputs += outputs

    async def end(self) -> None:
        """Wait for the end, with its error, and for what was reported before."""
        async with asyncio.timeout(LIMIT_S):
            await asyncio.wrap_future(self.thread.ended)
        await asyncio.sleep(0)


async def test_it_reports_on_the_event_loop_until_it_is_stopped(tmp_path: Path) -> None:
    owner = Owner(tmp_path)
    assert owner.thread.figures.stats.num_running == 0
    owner.thread.submit(AddGroup([1, 2, 3], [Sibling("a", PARAMS)]))
    await until(lambda: len(owner.outputs) == 20, "all tokens")
    owner.thread.submit(Stop())
    await owner.end()
    assert [output.token_id for output in owner.outputs] == undisturbed([1, 2, 3], PARAMS, FACTS, 100)
    assert owner.steps == [1] * 20
    assert owner.thread.figures.stats.num_generated_tokens == 20
    assert owner.thread.step_age_s() == pytest.approx(0.0)


async def test_it_waits_for_an_event_loop_that_takes_no_reports(tmp_path: Path) -> None:
    owner = Owner(tmp_path)
    owner.thread.submit(AddGroup([1, 2, 3], [Sibling("a", ENDLESS)]))
    await until(lambda: len(owner.steps) > STEPS_AHEAD, "steps that were taken")
    taken = len(owner.steps)
    wait_until(is_asleep(owner.thread), "the engine to wait for this event loop", LIMIT_S)
    assert taken < owner.runner.num_steps <= taken + STEPS_AHEAD + 1  # one in flight
    await until(lambda: len(owner.steps) > taken + STEPS_AHEAD, "further steps")
    wait_until(is_asleep(owner.thread), "the engine to wait again", LIMIT_S)
    owner.thread.close()
    owner.thread.join(LIMIT_S)
    assert not owner.thread.is_alive()


async def test_an_error_that_ends_the_thread_is_the_futures(tmp_path: Path) -> None:
    owner = Owner(tmp_path, BrokenRunner)
    owner.thread.submit(AddGroup([1], [Sibling("a", PARAMS)]))
    with pytest.raises(MemoryError, match="no memory for the step"):
        await owner.end()
    assert len(owner.outputs) == 2


class Panic(BaseException):
    """As pyo3 raises where a library in Rust panics: no Exception."""


async def test_a_panic_that_ends_the_thread_is_an_error_of_the_future(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def panic(*_: object, **__: object) -> None:
        raise Panic("tokenizers panicked")

    owner = Owner(tmp_path)
    monkeypatch.setattr(Engine, "adding_group", panic)
    owner.thread.submit(AddGroup([1], [Sibling("a", PARAMS)]))
    with pytest.raises(RuntimeError, match="Panic: tokenizers panicked"):
        await owner.end()


def test_an_error_of_the_load_is_the_futures() -> None:
    def make_engine() -> Engine:
        raise FileNotFoundError("no such model")

    thread = EngineThread(make_engine)
    thread.start()
    with pytest.raises(FileNotFoundError, match="no such model"):
        thread.loaded.result(LIMIT_S)
    thread.join(LIMIT_S)
    assert not thread.is_alive()


def test_without_a_folder_there_are_no_profiles(tmp_path: Path) -> None:
    thread = EngineThread(lambda: Engine(tmp_path, EngineConfig()))
    with pytest.raises(RuntimeError, match="--profile-dir"):
        thread.request_profile(1)
