"""What a pool must hold for a beam search to be taken."""

from pathlib import Path

import pytest
from pagestream_engine.config import EngineConfig
from pagestream_engine.engine import Engine
from pagestream_engine.errors import InvalidRequest
from pagestream_engine.request.sampling_params import SamplingParams
from support.engines.arithmetic_model import ArithmeticFacts, SeededRunner, make_folder


def test_one_beam_takes_what_a_sequence_takes(tmp_path: Path) -> None:
    options = {"block_size": 1, "num_gpu_blocks_override": 24, "max_num_seqs": 2, "max_num_batched_tokens": 2}
    engine = Engine(
        make_folder(tmp_path),
        EngineConfig.from_options(options),
        make_runner=lambda _, config: SeededRunner(config, ArithmeticFacts()),
    )
    params = SamplingParams(use_beam_search=True, beam_width=1, max_tokens=9, ignore_eos=True)
    engine.add_request("fits", [1] * 15, params)
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert len(outputs) == 9
    with pytest.raises(InvalidRequest, match="given 2 beams of up to 24 tokens, which take 35 blocks"):
        engine.add_request("does not", [1] * 15, SamplingParams(use_beam_search=True, beam_width=2, max_tokens=9))
