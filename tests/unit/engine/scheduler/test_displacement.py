from pathlib import Path

import pytest
from pagestream_engine.config import EngineConfig
from pagestream_engine.engine import Engine
from pagestream_engine.request.sampling_params import SamplingParams
from support.engines.arithmetic_model import ArithmeticFacts, ArithmeticRunner, make_folder

SHARED = [5] * 80
"""A prompt of 20 of the 40 blocks."""


def make_engine(folder: Path, num_blocks: int = 40, **options: int) -> Engine:
    return Engine(
        make_folder(folder),
        EngineConfig.from_options(
            {"scheduling_policy": "priority", "block_size": 4, "num_gpu_blocks_override": num_blocks, "max_num_seqs": 8}
            | options
        ),
        make_runner=lambda _, config: ArithmeticRunner(config, ArithmeticFacts(vocab_size=23)),
    )


def num_high_running(engine: Engine) -> int:
    return sum(seq.priority == 0 for seq in engine._scheduler.running())


@pytest.mark.parametrize("step_tokens", [64, 9], ids=["at once", "without a budget for the first step"])
def test_beyond_a_lowered_limit_each_takes_one_place(tmp_path: Path, step_tokens: int) -> None:
    """Eight of four that may run are displaced by what comes first as at a full batch: one for one."""
    engine = make_engine(tmp_path, 400, max_num_batched_tokens=step_tokens)
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    for number in range(8):
        engine.add_request(f"low {number}", [number + 1, 2, 3, 4, 5], params, priority=1)
    while engine.stats().num_running < 8:
        engine.step()
    engine.set_limits(4)
    for number in range(2):
        engine.add_request(f"high {number}", [9 + number] * 5, params, priority=0)
    for _ in range(12):
        engine.step()
    stats = engine.stats()
    assert (stats.num_displaced, stats.num_running, num_high_running(engine)) == (2, 8, 2)


def test_nobody_is_displaced_for_blocks_that_others_hold_too(tmp_path: Path) -> None:
    engine = make_engine(tmp_path)
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    engine.add_request("holder", [*SHARED, 1], params, priority=0)
    for _ in range(3):
        engine.step()
    for number in range(4):
        engine.add_request(f"low {number}", [*SHARED, number + 2], params, priority=1)
    while engine.stats().num_running < 5:
        engine.step()
    engine.add_request("big", [7] * 100, SamplingParams(temperature=0, max_tokens=2, ignore_eos=True), priority=0)
    for _ in range(3):
        engine.step()
    assert engine.stats().num_running == 5, "what the low ones hold alone would not make room"
    ended = set()
    while engine.has_unfinished_requests():
        ended |= {output.seq_id for output in engine.step() if output.finish_reason is not None}
    assert len(ended) == 6
