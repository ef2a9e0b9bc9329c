"""An engine on a thread: its facts or the error of its load, its reports on the event loop, its end."""

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from pagestream_engine import Engine, EngineConfig, SamplingParams, Sibling, StepOutput
from pagestream_engine.step.pending import PendingResult
from pagestream_engine.step.records import StepPlan
from pagestream_worker.stepping.commands import AddGroup, Stop
from pagestream_worker.stepping.engine_thread import EngineThread
from support.engines.arithmetic_model import ArithmeticFacts, ArithmeticRunner, make_folder, undisturbed
from support.processes.waiting import until

LIMIT_S = 10.0
FACTS = ArithmeticFacts()
PARAMS = SamplingParams(max_tokens=20, ignore_eos=True)


class BrokenRunner(ArithmeticRunner):
    """Fails from its third step on."""

    def execute(self, plan: StepPlan) -> PendingResult:
        if self.num_steps == 2:
            raise MemoryError("no memory for the step")
        return super().execute(plan)


class Owner:
    """The event loop's side of a thread."""

    def __init__(self, folder: Path, runner: type[ArithmeticRunner] = ArithmeticRunner) -> None:
        def make_engine() -> Engine:
            made_on.append(threading.current_thread())
            return Engine(make_folder(folder), EngineConfig(), make_runner=lambda _, config: runner(config, FACTS))

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

    def _take(self, outputs: Sequence[StepOutput]) -> None:
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
