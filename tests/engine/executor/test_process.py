"""The executor's process: the same tokens as inline, and each way in which it can fail."""

from __future__ import annotations

import multiprocessing
import signal
from collections import defaultdict
from collections.abc import Callable, Iterator
from multiprocessing import active_children
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from pagestream_engine import (
    Choice,
    ConfigError,
    Engine,
    EngineConfig,
    ExecutorDied,
    ExecutorError,
    Request,
    SamplingParams,
)
from support.engines.arithmetic_model import HOST_PAGE_BYTES, make_folder, undisturbed
from support.engines.faulty_runners import (
    COMPUTING,
    FACTS,
    DeviceBoundRunner,
    FaultyRunner,
    UnendingRunner,
    die_while_loading,
    rank_file,
    refuse_to_load,
)
from support.processes.waiting import LIMIT_S, wait_until

pytestmark = [pytest.mark.served, pytest.mark.usefixtures("ranks")]
OPTIONS = {
    "block_size": 4,
    "num_gpu_blocks_override": 24,
    "swap_space": 12 * HOST_PAGE_BYTES / 2**30,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 16,
}
PROMPTS = [[number, *range(1, 9)] for number in range(5)]
Tokens = dict[str, list[int]]


@pytest.fixture
def make_engine(tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []

    def make(**options: object) -> Engine:
        config = EngineConfig.from_options({**OPTIONS, "executor": "process", **options})
        engines.append(Engine(make_folder(tmp_path), config, make_runner=FaultyRunner))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def add_requests(engine: Engine) -> Tokens:
    """Add a group of two for each prompt; return what each gets alone."""
    expected: Tokens = {}
    for number, prompt in enumerate(PROMPTS):
        params = SamplingParams(seed=number, max_tokens=12)
        siblings = [Choice(f"{number}/{child}", params.for_child(number, child)) for child in range(2)]
        engine.add(Request(prompt, siblings))
        for sibling in siblings:
            seed = sibling.params.seed or 0
            expected[sibling.seq_id] = undisturbed(prompt, sibling.params, FACTS, engine.max_model_len, seed=seed)
    return expected


def run(engine: Engine, tokens: Tokens | None = None) -> Tokens:
    """Step to the end, or to an error; add to `tokens`."""
    tokens = defaultdict(list) if tokens is None else tokens
    while engine.has_unfinished_requests():
        for output in engine.step():
            assert output.token_id is not None
            tokens[output.seq_id].append(output.token_id)
    return tokens


def test_the_thread_that_waits_for_results_selects_the_device(tmp_path: Path) -> None:
    config = EngineConfig.from_options({**OPTIONS, "executor": "process"})
    engine = Engine(make_folder(tmp_path), config, make_runner=DeviceBoundRunner)
    try:
        expected = add_requests(engine)
        assert run(engine) == expected
    finally:
        engine.close()


@pytest.mark.parametrize("ahead", [True, False])
def test_the_tokens_are_those_of_an_undisturbed_run(make_engine: Callable[..., Engine], ahead: bool) -> None:
    engine = make_engine(async_scheduling=ahead)
    expected = add_requests(engine)
    assert run(engine) == expected
    engine.check_invariants()
    assert engine.stats().num_free_blocks == engine.stats().num_blocks


def test_its_death_in_a_step_is_noticed(make_engine: Callable[..., Engine], tmp_path: Path) -> None:
    engine = make_engine()
    add_requests(engine)
    rank_file(tmp_path).write_text("4 kill")
    with pytest.raises(ExecutorDied, match="killed by signal 9") as caught:
        run(engine)
    assert caught.value.exit_code == -signal.SIGKILL
    with pytest.raises(ExecutorDied):
        engine.step()


def test_its_death_is_noticed_while_nothing_runs(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    engine.check_executor()
    (child,) = [each for each in multiprocessing.active_children() if each.name == "pagestream-executor"]
    child.kill()
    child.join(LIMIT_S)
    with pytest.raises(ExecutorDied, match="killed by signal 9"):
        engine.check_executor()


def test_requests_go_on_after_its_death(make_engine: Callable[..., Engine], tmp_path: Path) -> None:
    engine = make_engine()
    expected = add_requests(engine)
    rank_file(tmp_path).write_text("6 kill")
    tokens: Tokens = defaultdict(list)
    with pytest.raises(ExecutorDied):
        run(engine, tokens)
    assert tokens
    engine.restart_executor()
    assert run(engine, tokens) == expected
    engine.check_invariants()


@pytest.mark.parametrize("ahead", [True, False])
def test_a_step_that_failed_there_can_be_run_again(
    make_engine: Callable[..., Engine], tmp_path: Path, ahead: bool
) -> None:
    """Nothing is launched behind it, though another one has been sent."""
    engine = make_engine(async_scheduling=ahead)
    expected = add_requests(engine)
    rank_file(tmp_path).write_text("4 raise unpicklable")
    tokens: Tokens = defaultdict(list)
    with pytest.raises(ExecutorError, match="Unpicklable") as caught:
        run(engine, tokens)
    assert "faulty_runners.py" in caught.value.__notes__[0]
    assert run(engine, tokens) == expected


@pytest.mark.parametrize("ahead", [True, False])
def test_answers_that_an_interrupted_caller_left_behind_are_not_taken(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, ahead: bool
) -> None:
    engine = make_engine(async_scheduling=ahead)
    expected = add_requests(engine)
    tokens: Tokens = defaultdict(list)
    for _ in range(3):
        with monkeypatch.context() as patched:
            patched.setattr("pagestream_engine.executor.process.wait", _interrupt)
            with pytest.raises(KeyboardInterrupt):
                run(engine, tokens)
    assert run(engine, tokens) == expected
    engine.check_invariants()


def test_a_caller_interrupted_within_a_message_has_lost_the_executor(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    expected = add_requests(engine)
    with monkeypatch.context() as patched:
        patched.setattr(Connection, "recv_bytes", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            run(engine)
    with pytest.raises(ExecutorDied):
        engine.step()
    engine.restart_executor()
    assert run(engine) == expected


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_it_ends_in_a_step_without_an_abort(tmp_path: Path) -> None:
    config = EngineConfig.from_options({"executor": "process", "async_scheduling": True})
    engine = Engine(make_folder(tmp_path), config, make_runner=UnendingRunner)
    [child] = active_children()
    engine.add_request("a", [1, 2, 3], SamplingParams())
    assert engine.step() == []
    wait_until((tmp_path / COMPUTING).exists, "the step to compute")
    engine.close()
    assert child.exitcode == 0


def test_what_loading_raises_comes_through(tmp_path: Path) -> None:
    config = EngineConfig.from_options({"executor": "process"})
    with pytest.raises(ConfigError, match="torch finds no GPU") as caught:
        Engine(make_folder(tmp_path), config, make_runner=refuse_to_load)
    assert caught.value.field == "device"
    with pytest.raises(ExecutorDied, match="killed by signal 9"):
        Engine(make_folder(tmp_path), config, make_runner=die_while_loading)
