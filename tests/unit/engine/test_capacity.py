"""What is measured without a KV cache is what an engine takes."""

from pathlib import Path

import pytest
from pagestream_engine import Engine, EngineConfig
from pagestream_engine.capacity import Capacity, measure_capacity
from pagestream_engine.errors import ConfigError
from support.engines.arithmetic_model import ArithmeticFacts, ArithmeticRunner, make_folder

FACTS = ArithmeticFacts()


def make_runner(_: Path, config: EngineConfig) -> ArithmeticRunner:
    return ArithmeticRunner(config, FACTS)


@pytest.mark.parametrize("num_blocks", [1, 2, 7, 4000])
def test_it_is_the_engines_own(tmp_path: Path, num_blocks: int) -> None:
    config = EngineConfig.from_options({"num_gpu_blocks_override": num_blocks, "block_size": 8})
    folder = make_folder(tmp_path)
    measured = measure_capacity(folder, config, make_runner=make_runner)
    engine = Engine(folder, config, make_runner=make_runner)
    assert (measured.max_model_len, measured.model_context) == (engine.max_model_len, engine.model_context)
    assert measured.max_model_len == min(FACTS.max_position_embeddings, 8 * num_blocks)
    assert measured.num_sequences == num_blocks // -(-measured.max_model_len // 8)


def test_what_was_asked_for_is_taken_or_refused(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)

    def measure(max_model_len: int) -> Capacity:
        options = {"num_gpu_blocks_override": 4, "block_size": 8, "max_model_len": max_model_len}
        return measure_capacity(folder, EngineConfig.from_options(options), make_runner=make_runner)

    assert measure(16) == Capacity(16, FACTS.max_position_embeddings, 2)
    with pytest.raises(ConfigError, match="max_model_len: given 33, expected at most 32, what 4 KV blocks hold"):
        measure(33)
