"""Steps that load blocks from host memory, one by one: through failures, and with another that runs meanwhile."""

from pathlib import Path

import pytest
from pagestream_engine.config import EngineConfig
from pagestream_engine.engine import Engine
from pagestream_engine.request.sampling_params import SamplingParams
from support.engines.arithmetic_model import HOST_PAGE_BYTES, ArithmeticFacts, SeededRunner, make_folder, undisturbed

FACTS = ArithmeticFacts(vocab_size=23)
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
FIRST = [1] * 17


class Served:
    """An engine with 12 blocks of 4 tokens, which has served others after FIRST, so that it is in host memory alone."""

    def __init__(self, folder: Path, *, ahead: bool) -> None:
        options = {"block_size": 4, "num_gpu_blocks_override": 12, "max_num_seqs": 2, "max_num_batched_tokens": 32}
        options |= {"async_scheduling": ahead, "swap_space": 40 * HOST_PAGE_BYTES / 2**30}
        config = EngineConfig.from_options(options)
        self.engine = Engine(make_folder(folder), config, make_runner=self._make_runner)
        for number, prompt in enumerate((FIRST, *([other] * 17 for other in range(2, 7)))):
            assert self.serve(str(number), prompt) == self.expected(prompt)
        assert self.engine.stats().loaded_bytes == 0

    def _make_runner(self, _: Path, config: EngineConfig) -> SeededRunner:
        self.runner = SeededRunner(config, FACTS)
        return self.runner

    def expected(self, prompt: list[int]) -> list[int]:
        return undisturbed(prompt, PARAMS, FACTS, self.engine.max_model_len)

    def serve(self, name: str, prompt: list[int]) -> list[int]:
        """Serve a request to its end, whatever fails on the way."""
        self.engine.add_request(name, prompt, PARAMS)
        tokens: list[int] = []
        while self.engine.has_unfinished_requests():
            try:
                outputs = self.engine.step()
            except MemoryError:
                outputs = []
            self.engine.check_invariants()
            tokens += [output.token_id for output in outputs if output.token_id is not None]
        return tokens


@pytest.mark.parametrize("ahead", [False, True])
def test_a_step_may_only_load(tmp_path: Path, ahead: bool) -> None:
    served = Served(tmp_path, ahead=ahead)
    before = served.engine.stats().num_prompt_tokens
    assert served.serve("again", FIRST) == served.expected(FIRST)
    stats = served.engine.stats()
    assert stats.loaded_bytes == 4 * HOST_PAGE_BYTES
    assert stats.host_hit_tokens == 16
    assert stats.num_prompt_tokens == before + 1


@pytest.mark.parametrize("fails", ["before", "after"])
@pytest.mark.parametrize("ahead", [False, True])
def test_loads_of_a_step_that_failed_are_made_again(tmp_path: Path, ahead: bool, fails: str) -> None:
    served = Served(tmp_path, ahead=ahead)
    served.runner.fails = fails
    assert served.serve("again", FIRST) == served.expected(FIRST)
    assert served.runner.fails is None
    assert served.engine.stats().loaded_bytes > 4 * HOST_PAGE_BYTES


@pytest.mark.parametrize("ahead", [False, True])
def test_a_request_that_is_aborted_while_it_loads_leaves_nothing(tmp_path: Path, ahead: bool) -> None:
    served = Served(tmp_path, ahead=ahead)
    served.engine.add_request("again", FIRST, PARAMS)
    served.engine.step()
    served.engine.abort_request("again")
    served.engine.check_invariants()
    assert served.engine.stats().num_free_blocks == 12
    assert served.serve("once more", FIRST) == served.expected(FIRST)
