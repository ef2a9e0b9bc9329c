"""A group of ranks: the same tokens as one process, and each way in which a rank can fail."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing import active_children
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from pagestream_engine import ConfigError, Engine, EngineConfig, RankLost, SamplingParams
from support.engines.arithmetic_model import make_folder, undisturbed
from support.engines.faulty_runners import FACTS, FaultyRunner, rank_file, refuse_to_load
from support.processes.waiting import LIMIT_S, children_of, is_running, wait_until

pytestmark = pytest.mark.served
OPTIONS = {"block_size": 4, "num_gpu_blocks_override": 24, "max_num_seqs": 8, "max_num_batched_tokens": 16}
PROMPTS = [[number, *range(1, 9)] for number in range(5)]
Tokens = dict[str, list[int]]


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    """Of two ranks, with five requests that have begun: the first step of a group has a longer limit."""
    config = EngineConfig.from_options({**OPTIONS, "tensor_parallel_size": 2})
    engine = Engine(make_folder(tmp_path), config, make_runner=FaultyRunner)
    for number, prompt in enumerate(PROMPTS):
        engine.add_request(str(number), prompt, params(number))
    yield engine
    engine.close()


def ranks_by_name() -> dict[str, BaseProcess]:
    return {child.name: child for child in active_children() if child.name.startswith("pagestream-rank")}


def params(number: int) -> SamplingParams:
    return SamplingParams(seed=number, max_tokens=12)


def expected(engine: Engine) -> Tokens:
    length = engine.max_model_len
    return {str(n): undisturbed(prompt, params(n), FACTS, length, seed=n) for n, prompt in enumerate(PROMPTS)}


def run(engine: Engine, tokens: Tokens) -> Tokens:
    """Step to the end, or to an error; add to `tokens`."""
    while engine.has_unfinished_requests():
        for output in engine.step():
            assert output.token_id is not None
            tokens[output.seq_id].append(output.token_id)
    return tokens


def begun(engine: Engine) -> Tokens:
    """Run until the first tokens have come."""
    tokens: Tokens = {str(number): [] for number in range(len(PROMPTS))}
    while not all(tokens.values()):
        for output in engine.step():
            assert output.token_id is not None
            tokens[output.seq_id].append(output.token_id)
    return tokens


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("0 kill", "rank 1 of 2 was killed by signal 9"),
        ("0 stop", "rank 1 of 2 made no progress for"),
        ("0 raise", "rank 1 of 2 failed alone"),
        ("0 differ", "rank 1 of 2 sampled other tokens than rank 0"),
    ],
)
def test_a_rank_that_fails_ends_the_group_and_requests_go_on_with_another(
    engine: Engine, tmp_path: Path, fault: str, reason: str
) -> None:
    tokens, ranks = begun(engine), ranks_by_name()
    assert len(ranks) == 2
    rank_file(tmp_path, 1).write_text(fault)
    with pytest.raises(RankLost, match=reason):
        run(engine, tokens)
    assert [rank.exitcode for rank in ranks.values()] == [-signal.SIGKILL] * 2
    with pytest.raises(RankLost, match=reason):
        engine.check_executor()
    rank_file(tmp_path, 1).unlink(missing_ok=True)
    engine.restart_executor()
    assert run(engine, tokens) == expected(engine)
    engine.check_invariants()


def test_a_step_that_all_ranks_fail_fails_alone(engine: Engine, tmp_path: Path) -> None:
    tokens = begun(engine)
    step = engine.stats().num_steps + 3  # not sent yet: one is in flight
    for rank in range(2):
        rank_file(tmp_path, rank).write_text(f"{step} raise")
    assert run(engine, tokens) == expected(engine), "a smaller step follows one that ran out of memory"
    assert not any(rank_file(tmp_path, rank).exists() for rank in range(2))


def test_a_death_is_noticed_while_nothing_runs(engine: Engine) -> None:
    ranks = ranks_by_name()
    engine.check_executor()
    ranks["pagestream-rank-1"].kill()
    ranks["pagestream-rank-1"].join(LIMIT_S)
    with pytest.raises(RankLost, match="rank 1 of 2 was killed by signal 9"):
        engine.check_executor()
    assert ranks["pagestream-rank-0"].exitcode == -signal.SIGKILL


def test_what_one_rank_raises_while_it_loads_comes_through(tmp_path: Path) -> None:
    config = EngineConfig.from_options({"tensor_parallel_size": 2})
    with pytest.raises(ConfigError, match="torch finds no GPU"):
        Engine(make_folder(tmp_path), config, make_runner=refuse_to_load)
    assert not ranks_by_name()


PARENT = """
import sys, time
from multiprocessing import active_children
from pathlib import Path
from pagestream_engine import Engine, EngineConfig
from support.engines.faulty_runners import FaultyRunner
if __name__ == "__main__":
    config = EngineConfig.from_options({"tensor_parallel_size": 2, "num_gpu_blocks_override": 8})
    engine = Engine(Path(sys.argv[1]), config, make_runner=FaultyRunner)
    print(*(child.pid for child in sorted(active_children(), key=lambda child: child.name)), flush=True)
    time.sleep(3600)
"""


@pytest.mark.parametrize("is_stopped", [False, True], ids=["running", "stopped"])
def test_ranks_end_with_their_parent(tmp_path: Path, is_stopped: bool) -> None:
    program = tmp_path / "parent.py"
    program.write_text(PARENT)
    support = str(Path(__file__).parents[2])
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([support, *sys.path])}
    command = [sys.executable, str(program), str(make_folder(tmp_path))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert set(pids) <= set(children_of(parent.pid))
        if is_stopped:  # such a one does not see that its pipe has ended
            os.kill(pids[1], signal.SIGSTOP)
        parent.kill()
    assert len(pids) == 2
    wait_until(lambda: not any(map(is_running, pids)), "the ranks to end")
