"""An engine that sleeps as on a GPU, whose tensors leave the device: it holds no address of memory that it gave up.

On a CPU under Triton's interpreter: the tensors go to other memory of the host, and theirs is freed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from pagestream_engine import LLM, LoRARequest, SamplingParams
from support.engines.lora_adapters import make_adapter
from support.engines.stale_addresses import freed, stale_addresses, storages
from support.engines.tiny_models import make_model, random_prompts
from support.kernels.worker import KernelWorker

pytestmark = pytest.mark.builds

OPTIONS: dict[str, Any] = {
    "attention_backend": "triton",
    "block_size": 16,
    "dtype": "bfloat16",
    "max_model_len": 64,
    "max_num_seqs": 2,
    "num_gpu_blocks_override": 12,
}
WITH_ADAPTERS: dict[str, Any] = {"enable_lora": True, "max_loras": 2}
FEATURES: dict[str, dict[str, Any]] = {
    "pages of the host, drafts": {**WITH_ADAPTERS, "swap_space": 0.001, "speculative_method": "ngram"},
    "int8 weights": {**WITH_ADAPTERS, "quantization": "int8"},
    "a draft model": {**WITH_ADAPTERS, "speculative_method": "draft_model"},
    "deterministic": {**WITH_ADAPTERS, "deterministic": True},
    "cache of fp8": {**WITH_ADAPTERS, "kv_cache_dtype": "fp8", "block_size": 64},
}


def sleep(folder: str, adapters: list[str], name: str, times: int) -> dict[str, Any]:
    """Serve with adapters; sleep, look for addresses, wake up and serve again, a number of times."""
    wanted = [LoRARequest(path, number, path) for number, path in enumerate(adapters, 1)]
    prompts = random_prompts([5] * len(wanted), seed=3)
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    with (
        patch("pagestream_engine.models.offload.leaves_device", lambda _: True),
        patch("pagestream_engine.layers.linear.runs_onednn", lambda *_: False),  # linears as a GPU has them
    ):
        own = {"speculative_model": folder} if name == "a draft model" else {}
        llm = LLM(folder, **{**OPTIONS, **FEATURES[name], **own})
        runner = llm.engine._steps.executor._runner  # type: ignore[attr-defined]

        def tokens() -> list[list[int]]:
            outputs = llm.generate(prompts, params, lora_request=wanted, use_tqdm=False)
            return [output.outputs[0].token_ids for output in outputs]

        served, stale, num_freed = [tokens()], [], []
        for _ in range(times):
            held = storages(runner)
            llm.sleep()
            gone = freed(held, storages(runner))
            num_freed.append(sum(end - begin for begin, end in gone))
            stale += stale_addresses(runner, gone)
            # What lay there is taken by others.
            others = [torch.full((end - begin,), 0xFF, dtype=torch.uint8) for begin, end in gone]
            llm.wake_up()
            served.append(tokens())
            others.clear()
        return {"served": served, "stale": stale, "freed": num_freed, "weights": runner.memory_bytes()["model"]}


@pytest.mark.parametrize(
    ("name", "times"),
    [(next(iter(FEATURES)), 1), *(pytest.param(each, 2, marks=pytest.mark.slow) for each in FEATURES)],
)
def test_a_sleeping_engine_holds_no_address_of_what_it_gave_up(
    interpreter: KernelWorker, tmp_path: Path, name: str, times: int
) -> None:
    folder = make_model(tmp_path / "model", "llama", num_hidden_layers=1, intermediate_size=128)
    adapters = [str(make_adapter(folder, tmp_path / f"adapter {seed}", seed=seed, r=4 * seed)) for seed in (1, 2)]
    found = interpreter.run(sleep, str(folder), adapters, name, times, limit_s=400)
    assert found["stale"] == []
    first, *others = found["served"]
    assert others == [first] * times
    assert min(found["freed"]) > found["weights"]


def test_a_table_of_addresses_that_takes_no_part_is_found() -> None:
    class Layer:
        def __init__(self) -> None:
            self.weight = torch.zeros(64)
            self.table = torch.tensor([[self.weight.data_ptr(), 3]])
            address = self.weight[8:].data_ptr()
            self.call = lambda: address
            self.names = {address: "weight"}

    layer = Layer()
    held = storages(layer)
    assert stale_addresses(layer, freed(held, storages(layer))) == []
    layer.weight.untyped_storage().resize_(0)
    paths = stale_addresses(layer, freed(held, storages(layer)))
    assert any("table" in path for path in paths)
    assert any("closure" in path for path in paths)
