"""The runner's logits are those of `transformers`, however a sequence's tokens are cut into steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pagestream_engine.cache.kv_groups import KVLayout, full_attention
from pagestream_engine.config import EngineConfig
from pagestream_engine.errors import ConfigError
from pagestream_engine.request.sampling_params import SamplingParams
from pagestream_engine.request.sequence import TokenSequence
from pagestream_engine.runner import ModelRunner
from pagestream_engine.scheduler.scheduled_step import ScheduledSequence, ScheduledStep
from support.engines.given_plans import given_plan
from support.engines.tiny_models import TINY_MODELS, make_model, random_prompts, reference_model
from torch import Tensor

_LAYOUT = full_attention(16)
_CPU = torch.device("cpu")
_BLOCKS = 60
_TOLERANCE = 2e-4  # float32; logits of these models are of the order of 10


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    base = tmp_path_factory.mktemp("models")
    return lambda name: make_model(base / name, name)


def _runner(folder: Path, **options: Any) -> ModelRunner:
    runner = ModelRunner(folder, EngineConfig.from_options({"num_gpu_blocks_override": _BLOCKS, **options}), _CPU)
    runner.allocate_kv_cache(options.get("num_gpu_blocks_override", _BLOCKS))
    return runner


def _sequences(lengths: list[int], layout: KVLayout = _LAYOUT, seed: int = 0) -> list[TokenSequence]:
    """Sequences whose blocks lie scattered over the pool, those of all KV groups."""
    ids = torch.randperm(_BLOCKS, generator=torch.Generator().manual_seed(seed)).tolist()
    seqs = []
    for index, prompt in enumerate(random_prompts(lengths, seed=seed)):
        params = SamplingParams(temperature=0, ignore_eos=True)
        seq = TokenSequence(str(index), prompt, params, seed=0, arrival=index, max_total_tokens=500)
        seq.block_tables = [[ids.pop() for _ in range(group.num_blocks_for(len(prompt)))] for group in layout.groups]
        seqs.append(seq)
    return seqs


def _logits(runner: ModelRunner, step: ScheduledStep) -> Tensor:
    """Logits of all of a step's tokens, in their packed order."""
    plan = given_plan(step, runner.kv_layout)
    with torch.inference_mode():
        runner.forget_rows()
        runner._batch.apply(plan)
        inputs = runner._batch.inputs(plan)
        rows = torch.arange(len(inputs.token_ids))
        hidden = runner._model.forward(inputs.token_ids, rows, runner._backend.prepare_step(inputs.attention))
        return runner._model.logits(hidden)


def _sampled(runner: ModelRunner, step: ScheduledStep) -> list[int]:
    return runner.execute(given_plan(step))().token_ids[:, 0].tolist()


def _advance(seqs: list[TokenSequence], counts: list[int]) -> None:
    for seq, count in zip(seqs, counts, strict=True):
        seq.num_computed_tokens += count


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("name", TINY_MODELS)
def test_logits_equal_those_of_transformers(folder_of: Callable[[str], Path], name: str, backend: str) -> None:
    folder = folder_of(name)
    runner = _runner(folder, attention_backend=backend)
    seqs = _sequences([1, 16, 37, 90], runner.kv_layout)
    # Three steps: whole prompts beside a chunk, a chunk beside decodes, decodes alone.
    steps = [([1, 14, 35, 20], 4), ([68, 1, 1], 1), ([1, 1, 1], 0)]
    chosen = [seqs, [seqs[3], seqs[1], seqs[2]], [seqs[3], seqs[1], seqs[2]]]
    got: dict[str, list[Tensor]] = {seq.seq_id: [] for seq in seqs}
    for (counts, num_prefills), present in zip(steps, chosen, strict=True):
        items = [ScheduledSequence(seq, count, False) for seq, count in zip(present, counts, strict=True)]
        logits = _logits(runner, ScheduledStep(items[:num_prefills], items[num_prefills:]))
        for seq, rows in zip(present, logits.split(counts), strict=True):
            got[seq.seq_id].append(rows)
        _advance(present, counts)
    reference = reference_model(folder)
    for seq in seqs:
        rows = torch.cat(got[seq.seq_id])
        with torch.no_grad():
            expected = reference(torch.tensor([seq.token_ids[: len(rows)]])).logits[0]
        torch.testing.assert_close(rows, expected, atol=_TOLERANCE, rtol=_TOLERANCE)
        assert len(rows) >= len(seq.token_ids) - 1


def test_tokens_come_for_those_that_need_a_sample_in_order(folder_of: Callable[[str], Path]) -> None:
    runner, seqs = _runner(folder_of("llama")), _sequences([20, 9, 30])
    items = [ScheduledSequence(seqs[0], 12, False), ScheduledSequence(seqs[1], 9, True)]
    assert len(_sampled(runner, ScheduledStep(prefills=items))) == 1
    _advance(seqs[:2], [12, 9])
    seqs[1].token_ids.append(7)
    rest = ScheduledStep(
        [ScheduledSequence(seqs[0], 8, True), ScheduledSequence(seqs[2], 10, False)],
        [ScheduledSequence(seqs[1], 1, True)],
    )
    together = _sampled(runner, rest)
    alone = []
    for seq, count in ((seqs[0], 8), (seqs[1], 1)):
        alone += _sampled(runner, ScheduledStep(prefills=[ScheduledSequence(seq, count, True)]))
    assert together == alone


def test_a_step_without_samples(folder_of: Callable[[str], Path]) -> None:
    runner, (seq,) = _runner(folder_of("llama")), _sequences([20])
    assert _sampled(runner, ScheduledStep(prefills=[ScheduledSequence(seq, 5, False)])) == []


def test_bfloat16_stays_near_float32(folder_of: Callable[[str], Path]) -> None:
    folder = folder_of("llama")
    logits = []
    for dtype in ("float32", "bfloat16"):
        (seq,) = _sequences([40])
        logits.append(_logits(_runner(folder, dtype=dtype), ScheduledStep([ScheduledSequence(seq, 40, False)])).float())
    error = (logits[0] - logits[1]).abs().mean() / logits[0].abs().mean()
    assert error < 0.05


def test_number_of_blocks(folder_of: Callable[[str], Path]) -> None:
    folder = folder_of("llama")
    config = EngineConfig.from_options({"max_num_seqs": 3, "max_model_len": 100})
    assert ModelRunner(folder, config, _CPU).profile_num_blocks() == 3 * 7
    with pytest.raises(ConfigError, match="at least 1"):
        _runner(folder).allocate_kv_cache(0)


def test_settings_that_do_not_fit_the_model_are_named(folder_of: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError, match="512") as caught:
        _runner(folder_of("llama"), max_model_len=513)
    assert caught.value.field == "max_model_len"
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="no GPU"):
            ModelRunner(folder_of("llama"), EngineConfig(), torch.device("cuda"))


def test_tells_how_many_bytes_weights_and_cache_take(folder_of: Callable[[str], Path]) -> None:
    for name in TINY_MODELS:
        folder = folder_of(name)
        runner = _runner(folder, dtype="float32")
        memory = runner.memory_bytes()
        weights = sum(tensor.numel() for tensor in reference_model(folder).parameters())
        head = runner._model._parameters.linear("head")
        if head.method.is_copy and runner._model.config.tie_word_embeddings:
            weights += head.method.shape[0] * head.method.shape[1]  # a copy of the embedding, in another layout
        assert memory["model"] == 4 * weights, name
        assert memory["kv_pool"] == runner._backend.store.cache.numel() * 4
