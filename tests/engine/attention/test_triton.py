"""The engine on the Triton kernels, under Triton's interpreter, in a process that interprets.

`make test` has what is short: the engine's methods by kernels of their own, and how a deterministic step is divided;
`make deep` generates by whole models.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pagestream_engine import ConfigError, Engine, EngineConfig, SamplingParams
from pagestream_engine.attention import AttentionBatch, CacheShape, KVStore, triton
from pagestream_engine.attention.triton import DeterministicTritonAttention, TritonMetadata, check_supported
from pagestream_engine.runner import ModelRunner, Step
from support.engines.forbidding_recorder import ForbiddingRecorder
from support.engines.tiny_models import make_model, random_prompts
from support.kernels.worker import KernelWorker

pytestmark = pytest.mark.builds


# -- methods by kernels of their own ------------------------------------------------------------------------------


def copy_in_one_launch() -> None:
    """The store copies blocks by one launch; where a source is a target, too, it reads all of them before."""
    from pagestream_engine.attention.triton import TritonKVStore
    from pagestream_kernels.launcher import recorded_launches

    store = TritonKVStore([CacheShape((0, 1), 2, 8, 16, torch.float16)], torch.device("cpu"))
    store.allocate(5)
    store.cache.copy_(torch.randn(store.cache.shape))
    for copies, num_launches in (([(0, 3), (1, 4)], 1), ([(3, 1), (1, 2)], 0)):
        before = store.cache.clone()
        with recorded_launches() as keys:
            store.copy_blocks(copies)
        assert [name for name, _, _ in keys] == ["_copy_blocks_kernel"] * num_launches
        for source, target in copies:
            assert torch.equal(store.cache[:, :, target], before[:, :, source])


def test_blocks_are_copied_in_one_launch(interpreter: KernelWorker) -> None:
    interpreter.run(copy_in_one_launch)


def multiply_by_int4() -> None:
    """The method of int4 with zeros and an order of inputs by this kernel."""
    from pagestream_engine.layers.quantised import (
        QuantisedWeight,
        Storage,
        TritonQuantisedMethod,
        choose_quantised_method,
    )

    for dtype, tolerance in ((torch.float32, 2e-5), (torch.bfloat16, 2.4e-2)):
        weight = QuantisedWeight(
            Storage.INT4,
            torch.randint(0, 16, (24, 96), dtype=torch.uint8),
            torch.rand(3, 24) / 50,
            group_size=32,
            zeros=torch.randint(0, 17, (3, 24), dtype=torch.uint8),
            order=torch.randperm(96),
        )
        method = choose_quantised_method(weight, dtype, exact=False, by_triton=True)
        assert isinstance(method, TritonQuantisedMethod)
        x, bias = torch.randn(5, 96).to(dtype), torch.randn(24).to(dtype)
        expected = (x.float() @ weight.dequantised(torch.float32).T + bias.float()).to(dtype)
        torch.testing.assert_close(method.product(x, bias), expected, rtol=tolerance, atol=tolerance)


def test_a_quantised_linear(interpreter: KernelWorker) -> None:
    interpreter.run(multiply_by_int4)


def add_adapters(dtype_name: str) -> None:
    """The class by this kernel adds what its class by torch does; a slot takes another adapter."""
    from pagestream_engine.features.lora.additions import (
        NO_SLOT,
        CurrentRows,
        TorchAdditions,
        TritonAdditions,
        group_rows,
    )
    from pagestream_engine.features.lora.files import ModuleSlice, ModuleWeights

    cpu, dtype, inputs, outputs = torch.device("cpu"), getattr(torch, dtype_name), 75, (70, 16, 33)
    places = [(sum(outputs[:part]), count) for part, count in enumerate(outputs)]
    modules = [ModuleSlice("linear", part, *place, inputs) for part, place in enumerate(places)]
    current = CurrentRows(is_exact=False)
    classes = (
        TritonAdditions(current, modules, 1, dtype, cpu),
        TorchAdditions(current, modules, 1, row_by_row=False),
    )
    x, y = torch.randn(5, inputs).to(dtype), torch.randn(5, sum(outputs)).to(dtype)
    for ranks in ((8, 16, 3), (64, None, 100)):
        weights = [
            None
            if rank is None
            else ModuleWeights(
                (torch.randn(rank, inputs) / inputs**0.5).to(dtype), (torch.randn(rank, n) / rank**0.5).to(dtype), 0.37
            )
            for rank, n in zip(ranks, outputs, strict=True)
        ]
        current.begin(group_rows(np.array([0, NO_SLOT, 0, 0, 0]), cpu), max_rank=256)
        found = []
        for each in classes:
            each.put(0, weights)
            found.append(each.add(y.clone(), x))
        tolerance = {"float32": 2e-5, "bfloat16": 2.4e-2}[dtype_name]
        torch.testing.assert_close(*found, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
def test_adapters(interpreter: KernelWorker, dtype: str) -> None:
    interpreter.run(add_adapters, dtype)


# -- what a GPU has not ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("capability", "hip"), [((8, 0), None), ((7, 5), None), ((8, 9), None), ((9, 4), "7.0")])
def test_float8_is_refused_where_triton_does_not_compile_it(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], hip: str | None
) -> None:
    shapes = [CacheShape((0,), 2, 64, 64, torch.bfloat16, torch.float8_e4m3fn)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "A GPU")
    monkeypatch.setattr(torch.version, "hip", hip)
    if hip is None and capability < (8, 9):
        with pytest.raises(ConfigError, match=r"kv_cache_dtype: given 'fp8', expected auto on this GPU, A GPU; it has"):
            check_supported(shapes, torch.device("cuda"))
    else:
        check_supported(shapes, torch.device("cuda"))


# -- how a deterministic step is divided: prompts to prefill, outputs to decode ---------------------------------------

SPANS = [(0, 10, 10), (30, 20, 40), (5, 3, 20), (0, 40, 6), (77, 1, 50)]
"""Of each sequence: tokens before the new ones, new tokens, tokens of its prompt. The last one decodes."""


FIRST_ROW = 3
"""Of the sequences' rows in the resident table."""


def _prepare(spans: list[tuple[int, int, int]], num_prefills: int) -> TritonMetadata:
    store = KVStore([CacheShape((0,), 1, 16, 8, torch.float32)], torch.device("cpu"))
    batch = AttentionBatch(
        positions=torch.cat([torch.arange(start, start + count) for start, count, _ in spans]),
        slots=torch.zeros(sum(count for _, count, _ in spans), dtype=torch.int64),
        block_tables=torch.zeros(8, 20, dtype=torch.int32),
        table_rows=FIRST_ROW + torch.arange(len(spans)),
        query_lens=[count for _, count, _ in spans],
        seq_lens=[start + count for start, count, _ in spans],
        num_prefills=num_prefills,
        prompt_lens=[prompt for _, _, prompt in spans],
    )
    return DeterministicTritonAttention(store).prepare(batch, 8)


@pytest.mark.parametrize("most_pieces", [4096, 32])
def test_each_token_goes_to_the_kernel_of_its_kind(monkeypatch: pytest.MonkeyPatch, most_pieces: int) -> None:
    monkeypatch.setattr(triton, "_MAX_PIECES", most_pieces)
    found = _prepare(SPANS, 4)
    packed = [(seq, place) for seq, (start, count, _) in enumerate(SPANS) for place in range(start, start + count)]
    assert found.order is not None
    assert found.places is not None
    assert found.order[found.places].tolist() == list(range(len(packed)))
    ordered = [packed[index] for index in found.order.tolist()]
    prompts = [(seq, place) for seq, place in packed if place < SPANS[seq][2]]
    assert ordered == prompts + [token for token in packed if token not in prompts]

    prefill = found.prefill
    assert prefill is not None
    assert prefill.num_tokens == len(prompts)
    assert prefill.table_rows.tolist() == [FIRST_ROW + seq for seq in range(4)]
    assert prefill.cu_query_lens.tolist() == [0, 10, 20, 23, 29]
    assert prefill.seq_lens.tolist() == [10, 40, 8, 6]
    computed = []
    for decode in found.decodes:
        starts = [0, 1] if decode.cu_query_lens is None else decode.cu_query_lens.tolist()
        assert decode.num_tokens == starts[-1]
        assert len(starts) - 1 <= max(1, most_pieces // 16)
        for index, (seq, end) in enumerate(
            zip((decode.table_rows - FIRST_ROW).tolist(), decode.seq_lens.tolist(), strict=True)
        ):
            length = starts[index + 1] - starts[index]
            assert 1 <= length <= decode.max_query_len <= 16
            assert end <= decode.max_seq_len
            computed += [(seq, place) for place in range(end - length, end)]
    assert computed == ordered[len(prompts) :]
    assert len(found.decodes) == (2 if most_pieces == 4096 else 3)


def test_a_step_without_outputs_that_are_computed_again_is_left_as_it_is() -> None:
    found = _prepare([(0, 10, 10), (30, 5, 40), (77, 1, 50)], 2)
    assert found.order is None
    assert found.prefill is not None
    assert found.prefill.num_tokens == 15
    assert [decode.num_tokens for decode in found.decodes] == [1]


# -- whole models ---------------------------------------------------------------------------------------------------


class WarmingRecorder(ForbiddingRecorder):
    """Also compares the kernels that a step needs with those of its recording."""

    def record(self, step: Step) -> Step:
        from pagestream_kernels.launcher import recorded_launches

        with recorded_launches() as launches:
            run = super().record(step)

        def replay() -> None:
            with recorded_launches() as launched:
                run()
            if launched != launches:
                raise AssertionError("a step needs other kernels than when it was recorded")

        return replay


def serve_recorded(folder: str) -> dict[str, Any]:
    """Serve some requests by the Triton kernels with recorded decodes, and by torch's operations without."""
    options = {"block_size": 8, "max_num_batched_tokens": 24, "num_gpu_blocks_override": 60, "max_num_seqs": 5}
    recorder = WarmingRecorder()

    def engine(backend: str, recorder: WarmingRecorder | None) -> Engine:
        config = EngineConfig.from_options({**options, "attention_backend": backend, "max_model_len": 64})

        def make_runner(folder: Path, config: EngineConfig) -> ModelRunner:
            runner = ModelRunner(folder, config, torch.device("cpu"), recorder)
            if backend == "triton":  # warm up, as where kernels are compiled
                runner._backend = replace(runner._backend, num_compilations=lambda: 0)
            return runner

        return Engine(Path(folder), config, make_runner=make_runner)

    from pagestream_kernels.launcher import recorded_launches

    with recorded_launches() as warmed:
        recorded = engine("triton", recorder)
    with recorded_launches() as launched:
        tokens = [_serve(recorded), _serve(engine("torch", None))]
    return {
        "tokens": tokens,
        "checked": recorder.num_checked,
        "kernels": sorted({name for name, *_ in launched}),
        "late": sorted(map(str, launched - warmed)),
    }


def _serve(engine: Engine) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    for number, prompt in enumerate(random_prompts([3, 30, 11, 1], seed=1)):
        temperature = 0.9 if number == 1 else 0.0
        params = SamplingParams(temperature=temperature, seed=3, max_tokens=6 + number, ignore_eos=True)
        engine.add_request(str(number), prompt, params)
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.token_id is not None:
                tokens.setdefault(output.seq_id, []).append(output.token_id)
    return tokens


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_recorded_steps_repeat_and_warmed_kernels_suffice(interpreter: KernelWorker, tmp_path: Path) -> None:
    """All but the capture."""
    folder = make_model(tmp_path / "model", "qwen3-window", num_hidden_layers=2)
    found = interpreter.run(serve_recorded, str(folder), limit_s=550)
    recorded, by_torch = found["tokens"]
    assert recorded == by_torch
    assert [len(recorded[str(number)]) for number in range(4)] == [6, 7, 8, 9]
    assert found["checked"] >= 6
    assert len(found["kernels"]) >= 5
    assert found["late"] == []


def generate(folder: str, backend: str) -> list[list[int]]:
    from pagestream_engine import LLM

    options = {"attention_backend": backend, "block_size": 8, "max_num_batched_tokens": 24}
    llm = LLM(folder, **options, num_gpu_blocks_override=40)
    params = [
        SamplingParams(temperature=0, max_tokens=6, ignore_eos=True),
        SamplingParams(temperature=0.9, top_p=0.9, seed=3, max_tokens=5, ignore_eos=True, n=2),
        SamplingParams(temperature=0, max_tokens=4, ignore_eos=True),
    ]
    outputs = llm.generate(random_prompts([3, 30, 11], seed=1), params, use_tqdm=False)
    return [list(choice.token_ids) for output in outputs for choice in output.outputs]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_generate_gives_the_same_tokens_as_torch(interpreter: KernelWorker, tmp_path: Path) -> None:
    folder = str(make_model(tmp_path / "model", "qwen3", num_hidden_layers=2))
    triton = interpreter.run(generate, folder, "triton", limit_s=550)
    assert [len(tokens) for tokens in triton] == [6, 5, 5, 4]
    assert triton[1] != triton[2]
    assert triton == generate(folder, "torch") == generate(folder, "auto")
