"""The engine thread: commands in, outputs out, and a future for its end."""

import queue
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from pagestream_engine import Engine, EngineConfig, SamplingParams, Sibling, StepOutput
from pagestream_engine import engine as engine_module
from pagestream_engine.scheduler.base import SampledTokens, ScheduledStep
from pagestream_worker.stepping import engine_thread
from pagestream_worker.stepping.engine_thread import AbortSequences, AddGroup, EngineThread, Stop
from support.engines.arithmetic_model import ArithmeticFacts, ArithmeticRunner, make_folder, undisturbed

LIMIT_S = 10.0
FACTS = ArithmeticFacts()
PARAMS = SamplingParams(max_tokens=20, ignore_eos=True)


class BrokenRunner(ArithmeticRunner):
    """Fails from its third step on."""

    def execute(self, step: ScheduledStep) -> SampledTokens:
        if self.num_steps == 2:
            raise MemoryError("no memory for the step")
        return super().execute(step)


class Owner:
    """The owner's side of a thread."""

    def __init__(self, folder: Path, runner: type[ArithmeticRunner] = ArithmeticRunner) -> None:
        def make_engine() -> Engine:
            made_on.append(threading.current_thread())
            return Engine(make_folder(folder), EngineConfig(), make_runner=lambda _, config: runner(config, FACTS))

        made_on: list[threading.Thread] = []
        self.outputs: queue.SimpleQueue[Sequence[StepOutput]] = queue.SimpleQueue()
        self.thread = EngineThread(make_engine)
        self.steps: list[tuple[float, int]] = []
        self.thread.listen(
            on_outputs=self.outputs.put,
            on_step=lambda duration_s, sequences: self.steps.append((duration_s, sequences)),
        )
        self.thread.start()
        self.thread.loaded.result(LIMIT_S)
        assert made_on == [self.thread]

    def next_outputs(self) -> Sequence[StepOutput]:
        return self.outputs.get(timeout=LIMIT_S)

    def tokens_of(self, seq_id: str) -> list[int]:
        tokens: list[int] = []
        while True:
            for output in self.next_outputs():
                if output.request_id == seq_id:
                    tokens += [] if output.token_id is None else [output.token_id]
                    if output.finish_reason is not None:
                        return tokens

    def end(self) -> None:
        self.thread.submit(Stop())
        assert self.thread.ended.exception(LIMIT_S) is None
        self.thread.join(LIMIT_S)
        assert not self.thread.is_alive()


def test_a_sequence_runs_to_its_end(tmp_path: Path) -> None:
    owner = Owner(tmp_path)
    owner.thread.submit(AddGroup([1, 2, 3], [Sibling("a", PARAMS, [])]))
    assert owner.tokens_of("a") == undisturbed([1, 2, 3], PARAMS, FACTS, 100)
    owner.end()
    assert [sequences for _, sequences in owner.steps] == [1] * 20
    assert all(duration_s > 0 for duration_s, _ in owner.steps)


def test_refused_siblings_all_end(tmp_path: Path) -> None:
    owner = Owner(tmp_path)
    siblings = [Sibling("a", PARAMS), Sibling("b", PARAMS, [FACTS.vocab_size])]
    owner.thread.submit(AddGroup([1, 2, 3], siblings))
    refused = owner.next_outputs()
    assert [(output.request_id, output.finish_reason) for output in refused] == [("a", "error"), ("b", "error")]
    owner.thread.submit(AddGroup([1, 2, 3], [Sibling("a", PARAMS), Sibling("b", PARAMS)]))
    assert owner.tokens_of("b") == undisturbed([1, 2, 3], PARAMS, FACTS, 100)
    owner.end()


def test_a_sequence_goes_on_where_another_engine_left_it(tmp_path: Path) -> None:
    whole = undisturbed([1, 2, 3], PARAMS, FACTS, 100)
    owner = Owner(tmp_path)
    owner.thread.submit(AddGroup([1, 2, 3], [Sibling("a", PARAMS, whole[:7])]))
    assert owner.tokens_of("a") == whole[7:]
    owner.end()


def test_a_refused_sequence_ends_alone(tmp_path: Path) -> None:
    owner = Owner(tmp_path)
    owner.thread.submit(AddGroup([FACTS.vocab_size], [Sibling("bad", PARAMS, [])]))
    owner.thread.submit(AddGroup([1], [Sibling("good", PARAMS, [])]))
    [refused] = owner.next_outputs()
    assert (refused.request_id, refused.finish_reason) == ("bad", "error")
    assert refused.error is not None
    assert str(FACTS.vocab_size) in refused.error
    assert owner.tokens_of("good") == undisturbed([1], PARAMS, FACTS, 100)
    owner.end()


def test_an_aborted_sequence_has_no_further_output(tmp_path: Path) -> None:
    owner = Owner(tmp_path)
    endless = SamplingParams(max_tokens=None, ignore_eos=True)
    owner.thread.submit(AddGroup([1], [Sibling("a", endless, [])]))
    owner.next_outputs()
    owner.thread.submit(AbortSequences(["a", "unknown"]))
    owner.thread.submit(AddGroup([2], [Sibling("b", PARAMS, [])]))
    assert owner.tokens_of("b") == undisturbed([2], PARAMS, FACTS, 100)
    owner.end()
    while not owner.outputs.empty():
        assert all(output.request_id != "a" for output in owner.next_outputs())


@pytest.fixture
def slow_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four tokens of a resumed sequence are replayed before each step."""
    monkeypatch.setattr(engine_thread, "ADD_LIMIT_S", 0.0)
    for module in (engine_module, engine_thread):
        monkeypatch.setattr(module, "REPLAY_TOKENS", 4)


def test_a_long_resumed_sequence_holds_no_step_up(tmp_path: Path, slow_replay: None) -> None:
    whole = undisturbed([1, 2, 3], replace(PARAMS, max_tokens=70), FACTS, 100)
    owner, endless = Owner(tmp_path), SamplingParams(max_tokens=None, ignore_eos=True)
    owner.thread.submit(AddGroup([1], [Sibling("a", endless, [])]))
    owner.next_outputs()
    owner.thread.submit(AddGroup([1, 2, 3], [Sibling("b", replace(PARAMS, max_tokens=70), whole[:60])]))
    num_steps, seen = 0, []
    while not seen:
        num_steps += 1
        seen = [output.token_id for output in owner.next_outputs() if output.request_id == "b"]
    assert (seen, num_steps >= 15) == (whole[60:61], True)
    owner.end()


def test_a_sequence_that_is_aborted_while_it_is_replayed_never_runs(tmp_path: Path, slow_replay: None) -> None:
    owner, endless = Owner(tmp_path), SamplingParams(max_tokens=None, ignore_eos=True)
    owner.thread.submit(AddGroup([1, 2, 3], [Sibling("b", endless, [5] * 60)]))
    owner.thread.submit(AbortSequences(["b"]))
    owner.thread.submit(AddGroup([2], [Sibling("c", PARAMS, [])]))
    assert owner.tokens_of("c") == undisturbed([2], PARAMS, FACTS, 100)
    owner.end()
    assert [sequences for _, sequences in owner.steps] == [1] * 20


def test_an_idle_thread_stops_at_once(tmp_path: Path) -> None:
    owner = Owner(tmp_path)
    owner.end()


def test_an_error_that_ends_the_thread_is_the_futures(tmp_path: Path) -> None:
    owner = Owner(tmp_path, BrokenRunner)
    owner.thread.submit(AddGroup([1], [Sibling("a", PARAMS, [])]))
    assert isinstance(owner.thread.ended.exception(LIMIT_S), MemoryError)
    owner.thread.join(LIMIT_S)


class Panic(BaseException):
    """As pyo3 raises where a library in Rust panics: no Exception."""


def test_a_panic_that_ends_the_thread_is_an_error_of_the_future(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def panic(*_: object, **__: object) -> None:
        raise Panic("tokenizers panicked")

    owner = Owner(tmp_path)
    monkeypatch.setattr(Engine, "adding_group", panic)
    owner.thread.submit(AddGroup([1], [Sibling("a", PARAMS, [])]))
    error = owner.thread.ended.exception(LIMIT_S)
    assert isinstance(error, RuntimeError)
    assert "Panic: tokenizers panicked" in str(error)
    owner.thread.join(LIMIT_S)


def test_a_step_in_progress_has_an_age_and_no_step_has_none(tmp_path: Path) -> None:
    owner = Owner(tmp_path)
    assert owner.thread.step_age_s() == pytest.approx(0.0)
    owner.end()


def test_an_error_of_the_load_is_the_futures() -> None:
    def make_engine() -> Engine:
        raise FileNotFoundError("no such model")

    thread = EngineThread(make_engine)
    thread.start()
    with pytest.raises(FileNotFoundError, match="no such model"):
        thread.loaded.result(LIMIT_S)
    thread.join(LIMIT_S)
    assert not thread.is_alive()
