"""Weights in host memory: equal tokens whatever is offloaded, two buffers, copies ahead, and what is refused.

A test's copier stands for the GPU's stream: all else is the code that runs there.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from pagestream_engine import ConfigError, Engine, EngineConfig, SamplingParams, UnsupportedOption, size_model
from pagestream_engine.layers import Linear
from pagestream_engine.layers.linear import PlainMethod
from pagestream_engine.models import offload
from pagestream_engine.models.config import ConfigFile
from pagestream_engine.models.offload import NUM_BUFFERS, MovedTensors, OffloadPlan, Wait, plan_offload, tensors_of
from pagestream_engine.models.registry import find_family
from pagestream_engine.models.weights import LinearWeight, TensorWeight, WeightMap
from pagestream_engine.request import Adapter
from pagestream_engine.runner import ModelRunner
from support.engines.lora_adapters import make_adapter
from support.engines.tiny_models import random_prompts
from torch import Tensor, nn

NUM_LAYERS = 7
CPU = torch.device("cpu")


pytestmark = pytest.mark.served


NAN_BYTES = 0xFF
"""Every floating point number of such bytes is NaN."""


class LateCopier:
    """Copies when the computation waits for it, on the device of the test."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []
        """What was begun and waited for, with the address of the page in host memory."""
        self.fails_after: int | None = None
        """Copies that begin before one runs out of memory; None: none does."""

    def begin(self, target: Tensor, source: Tensor) -> Wait:
        if self.fails_after is not None:
            self.fails_after -= 1
            if self.fails_after < 0:
                self.fails_after = None
                raise MemoryError("no room to launch a copy")
        self.events.append(("begin", source.data_ptr()))
        target.fill_(NAN_BYTES)

        def wait() -> None:
            self.events.append(("wait", source.data_ptr()))
            target.copy_(source)

        return wait


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


@pytest.mark.parametrize(
    ("model", "deterministic"),
    [
        ("qwen3-moe", False),
        ("gemma3", True),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("qwen3-moe", True), ("gemma3", False))),
        *(pytest.param(name, mode, marks=pytest.mark.slow) for name in ("llama", "qwen2") for mode in (False, True)),
    ],
)
def test_tokens_are_equal_with_half_and_with_all_layers_offloaded(
    model_of: Callable[..., Path], model: str, *, deterministic: bool
) -> None:
    layer_types = ["sliding_attention", "full_attention"] * 3 + ["full_attention"]
    changes: dict[str, Any] = {"layer_types": layer_types} if model == "gemma3" else {}
    folder = model_of(model, num_hidden_layers=NUM_LAYERS, **changes)
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


def test_adapters_add_to_weights_that_come_and_go(model_of: Callable[..., Path], tmp_path: Path) -> None:
    folder = model_of("llama", num_hidden_layers=NUM_LAYERS)
    path, found = make_adapter(folder, tmp_path / "adapter"), []
    for copier, num_bytes in ((None, 0), (LateCopier(), 1 << 30)):
        engine, _ = engine_of(folder, copier, num_bytes, enable_lora=True)
        adapter = engine.adapters.load("adapter", path)
        found.append(serve(engine, adapter))
    assert found[0] == found[1] != serve(engine_of(folder, None, 0)[0])


def test_each_copy_has_begun_while_another_layer_computes(model_of: Callable[..., Path]) -> None:
    folder, copier = model_of("llama", num_hidden_layers=NUM_LAYERS), LateCopier()
    engine, _ = engine_of(folder, copier, 4 * plan_for(folder).page_bytes)
    serve(engine)
    events = copier.events[4:]  # the first two layers' have no layer before them
    waits = [place for place, (kind, _) in enumerate(events) if kind == "wait"]
    assert len(waits) > 20
    late = [place for place in waits if place and events[place - 1] == ("begin", events[place][1])]
    assert not late
    assert len({page for _, page in events}) == 4


@pytest.mark.parametrize(
    "fails_after", [1, 12, *(pytest.param(count, marks=pytest.mark.slow) for count in (0, 2, 3, 4, 13))]
)
def test_a_copy_that_can_not_be_launched_fails_its_step_alone(model_of: Callable[..., Path], fails_after: int) -> None:
    folder, copier = model_of("llama", num_hidden_layers=NUM_LAYERS), LateCopier()
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


def test_sizes_count_what_is_offloaded(model_of: Callable[..., Path]) -> None:
    folder = model_of("llama", num_hidden_layers=NUM_LAYERS)
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


def test_who_can_not_offload_refuses_by_name(model_of: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = model_of("llama", num_hidden_layers=NUM_LAYERS)
    with pytest.raises(UnsupportedOption, match=r"cpu_offload_gb: given 1\.0, .*a CPU computes with the weights where"):
        engine_of(folder, None, 1 << 30)
    with pytest.raises(ConfigError, match=r"cpu_offload_gb: given .*, expected at most the .* GiB of host memory"):
        engine_of(folder, LateCopier(), 1 << 60)
    monkeypatch.setattr("pagestream_engine.models.registry.find_family", lambda _: None)
    with pytest.raises(UnsupportedOption, match=r"LlamaForCausalLM runs by the code of transformers"):
        engine_of(folder, LateCopier(), 1 << 30)


# -- tensors whose memory goes to the host while an engine sleeps -----------------------------------------------------


def test_tensors_come_back_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "_GRANULE_BYTES", 64)
    monkeypatch.setattr(offload, "slab_pages", lambda num_bytes, page_bytes, *, pinned: [1] * (num_bytes // page_bytes))
    matrix, module = torch.randn(7, 9), nn.Sequential(nn.Linear(3, 5), nn.ParameterList([torch.randn(4)]))
    held = {"a": [Linear(PlainMethod(matrix[2:]), matrix[0])], "b": (module, None, 3)}
    num_bytes = sum(each.untyped_storage().nbytes() for each in (matrix, *module.parameters()))
    expected = [each.detach().clone() for each in tensors_of([held])]
    moved = MovedTensors(tensors_of([held]), CPU)
    assert moved.num_bytes == num_bytes
    assert all(each.untyped_storage().nbytes() == 0 for each in tensors_of([held]))
    moved.restore()
    found = list(tensors_of([held]))
    assert len(found) == 5
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    matrix.zero_()
    assert not held["a"][0].method.weight.any(), "a view of what came back"  # type: ignore[index, union-attr]


@pytest.mark.parametrize(
    ("name", "options"),
    [("llama-tied", {}), ("mixtral", {}), ("gemma3", {"quantization": "int8"})],
)
def test_all_weights_of_a_model_are_found(model_of: Callable[..., Path], name: str, options: dict[str, Any]) -> None:
    config = EngineConfig.from_options({"dtype": "float32", "deterministic": True, **options})
    runner = ModelRunner(model_of(name), config, CPU)
    found = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors_of([runner._model])}
    assert sum(found.values()) >= runner.memory_bytes()["model"]
