from pathlib import Path

from pagestream_engine.config import EngineConfig
from pagestream_engine.engine import Engine
from pagestream_engine.request.sampling_params import SamplingParams
from support.engines.arithmetic_model import ArithmeticFacts, ArithmeticRunner, make_folder

SHARED = [5] * 80
"""A prompt of 20 of the 40 blocks."""


def test_nobody_is_displaced_for_blocks_that_others_hold_too(tmp_path: Path) -> None:
    options = {"scheduling_policy": "priority", "block_size": 4, "num_gpu_blocks_override": 40, "max_num_seqs": 8}
    engine = Engine(
        make_folder(tmp_path),
        EngineConfig.from_options(options),
        make_runner=lambda _, config: ArithmeticRunner(config, ArithmeticFacts(vocab_size=23)),
    )
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
