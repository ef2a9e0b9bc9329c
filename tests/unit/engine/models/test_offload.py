"""Weights in host memory: equal tokens whatever is offloaded, two buffers, copies ahead, and what is refused.

A test's copier stands for the GPU's stream: all else is the code that runs there.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from pagestream_engine.config import EngineConfig
from pagestream_engine.engine import Engine
from pagestream_engine.errors import ConfigError, UnsupportedOption
from pagestream_engine.models.config import ConfigFile
from pagestream_engine.models.offload.plan import NUM_BUFFERS, OffloadPlan, plan_offload
from pagestream_engine.models.registry import find_family
from pagestream_engine.models.weights import LinearWeight, TensorWeight, WeightMap
from pagestream_engine.request.adapter import Adapter
from pagestream_engine.request.sampling_params import SamplingParams
from pagestream_engine.runner import ModelRunner
from pagestream_engine.sizing import size_model
from support.engines.late_copier import LateCopier
from support.engines.lora_adapters import make_adapter
from support.engines.tiny_models import make_model, random_prompts

NUM_LAYERS = 7
CPU = torch.device("cpu")


def weights_of(folder: Path) -> WeightMap:
    file = ConfigFile.read(folder)
    family = find_family(file.architectures[0])
    assert family is not None
    return family.weights(family.read(file))


def plan_for(folder: Path, max_bytes: int = 1 << 30) -> OffloadPlan:
    return plan_offload(weights_of(folder), torch.float32, max_bytes, pinned=False)


def engine_of(folder: Path, copier: LateCopier | None, num_bytes: int, **options: Any) -> tuple[Engine, ModelRunner]:
    settings = {"dtype": "float32", "device": "cpu", "attention_backend": "torch", "num_gpu_blocks_override": 40}
    settings |= {"max_num_seqs": 4, "max_num_batched_tokens": 24, "cpu_offload_gb": num_bytes / 2**30, **options}
    runners: list[ModelRunner] = []

    def make_runner(folder: Path, config: EngineConfig) -> ModelRunner:
        runners.append(ModelRunner(folder, config, CPU, copier=copier))
        return runners[-1]

    return Engine(folder, EngineConfig.from_options(settings), make_runner=make_runner), runners[0]


def serve(engine: Engine, adapter: Adapter | None = None) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    for number, prompt in enumerate(random_prompts([30, 3, 11])):
        engine.add_request(str(number), prompt, params, adapter=adapter if number else None)
    while engine.has_unfinished_requests():
        for output in engine.step():
            assert output.error is None, output.error
            if output.token_id is not None:
                tokens.setdefault(output.seq_id, []).append(output.token_id)
    return tokens


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("model", ["llama", "qwen2", "qwen3-moe", "gemma3"])
def test_tokens_are_equal_with_half_and_with_all_layers_offloaded(
    tmp_path: Path, model: str, *, deterministic: bool
) -> None:
    layer_types = ["sliding_attention", "full_attention"] * 3 + ["full_attention"]
    changes: dict[str, Any] = {"layer_types": layer_types} if model == "gemma3" else {}
    folder = make_model(tmp_path / model, model, num_hidden_layers=NUM_LAYERS, **changes)
    options = {"deterministic": deterministic}
    plain, runner = engine_of(folder, None, 0, **options)
    expected, on_device = serve(plain), runner.memory_bytes()["model"]
    for count in (4, NUM_LAYERS):
        plan = plan_for(folder, count * plan_for(folder).page_bytes)
        assert len(plan.pages) == count
        copier = LateCopier()
        engine, runner = engine_of(folder, copier, count * plan.page_bytes, **options)
        assert serve(engine) == expected
        assert runner.memory_bytes()["model"] == on_device - plan.freed_bytes
        assert plan.freed_bytes == plan.weight_bytes - NUM_BUFFERS * plan.page_bytes > 0


def test_adapters_add_to_weights_that_come_and_go(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "llama", "llama", num_hidden_layers=NUM_LAYERS)
    path, found = make_adapter(folder, tmp_path / "adapter"), []
    for copier, num_bytes in ((None, 0), (LateCopier(), 1 << 30)):
        engine, _ = engine_of(folder, copier, num_bytes, enable_lora=True)
        adapter = engine.adapters.load("adapter", path)
        found.append(serve(engine, adapter))
    assert found[0] == found[1] != serve(engine_of(folder, None, 0)[0])


def test_each_copy_has_begun_while_another_layer_computes(tmp_path: Path) -> None:
    folder, copier = make_model(tmp_path / "llama", "llama", num_hidden_layers=NUM_LAYERS), LateCopier()
    engine, _ = engine_of(folder, copier, 4 * plan_for(folder).page_bytes)
    serve(engine)
    events = copier.events[4:]  # the first two layers' have no layer before them
    waits = [place for place, (kind, _) in enumerate(events) if kind == "wait"]
    assert len(waits) > 20
    late = [place for place in waits if place and events[place - 1] == ("begin", events[place][1])]
    assert not late
    assert len({page for _, page in events}) == 4


@pytest.mark.parametrize("fails_after", [*range(5), 12, 13])
def test_a_copy_that_can_not_be_launched_fails_its_step_alone(tmp_path: Path, fails_after: int) -> None:
    folder, copier = make_model(tmp_path / "llama", "llama", num_hidden_layers=NUM_LAYERS), LateCopier()
    expected = serve(engine_of(folder, None, 0)[0])
    engine, _ = engine_of(folder, copier, 1 << 30)
    copier.fails_after = fails_after
    assert serve(engine) == expected
    assert copier.fails_after is None


@pytest.mark.parametrize(("num_layers", "count"), [(3, 3), (32, 3), (32, 12), (80, 79)])
def test_layers_are_spread_evenly(num_layers: int, count: int) -> None:
    weights = {f"{index}.linear": LinearWeight.of(f"l{index}", 8, 64) for index in range(num_layers)}
    plan = plan_offload(weights, torch.bfloat16, count * 1024 + 1023, pinned=False)
    chosen = list(plan.pages)
    assert (len(chosen), plan.page_bytes, sum(plan.slabs)) == (count, 1024, count)
    gaps = {after - before for before, after in pairwise(chosen)}
    assert max(gaps) - min(gaps) <= 1


def test_pinned_pages_stay_within_the_bytes_that_were_given() -> None:
    page = 300 << 20
    weights: WeightMap = {f"{index}.w": LinearWeight.of(str(index), page // 2048, 1024) for index in range(40)}
    plan = plan_offload(weights, torch.bfloat16, 5 << 30, pinned=True)
    rounded = sum(1 << (count * page - 1).bit_length() for count in plan.slabs)
    assert rounded <= 5 << 30
    assert len(plan.pages) == sum(plan.slabs) == 15


def test_sizes_count_what_is_offloaded(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "llama", "llama", num_hidden_layers=NUM_LAYERS)
    whole, sized = (
        size_model(folder, EngineConfig.from_options({"cpu_offload_gb": given, "dtype": "float32"})) for given in (0, 1)
    )
    plan = plan_for(folder)
    assert (whole.host_weight_bytes, sized.host_weight_bytes) == (0, plan.weight_bytes)
    assert sized.weight_bytes == whole.weight_bytes - plan.freed_bytes


def test_what_frees_nothing_is_refused() -> None:
    weights = {f"{index}.linear": LinearWeight.of(f"l{index}", 8, 64) for index in range(9)}
    with pytest.raises(ConfigError, match=r"cpu_offload_gb: given .*, expected .* at least 3 layers .* 9; 2 layers"):
        plan_offload(weights, torch.bfloat16, 2500, pinned=False)
    with pytest.raises(ConfigError, match=r"of which there are 0"):
        plan_offload({"norm": TensorWeight.of("n", 4)}, torch.bfloat16, 1 << 30, pinned=False)


def test_who_can_not_offload_refuses_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_model(tmp_path / "llama", "llama", num_hidden_layers=NUM_LAYERS)
    with pytest.raises(UnsupportedOption, match=r"cpu_offload_gb: given 1\.0, .*a CPU computes with the weights where"):
        engine_of(folder, None, 1 << 30)
    with pytest.raises(ConfigError, match=r"cpu_offload_gb: given .*, expected at most the .* GiB of host memory"):
        engine_of(folder, LateCopier(), 1 << 60)
    monkeypatch.setattr("pagestream_engine.models.select.find_family", lambda _: None)
    with pytest.raises(UnsupportedOption, match=r"LlamaForCausalLM runs by the code of transformers"):
        engine_of(folder, LateCopier(), 1 << 30)
