"""The log probabilities of every fused family are those of `transformers`, however its tokens are cut into steps."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own habit
from pagestream_engine import LLM, ConfigError, Engine, EngineConfig, Logprob, RequestOutput, SamplingParams
from pagestream_engine.models.families.mpt import mpt_slopes
from pagestream_engine.models.gpt import alibi_slopes
from safetensors.torch import load_file, save_file
from support.engines.tiny_models import TINY_MODELS, VOCAB_SIZE, random_prompts, reference_model
from torch import Tensor

pytestmark = pytest.mark.served

TOLERANCE = 5e-4
"""Of float32."""
ALL = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=-1, prompt_logprobs=-1)
BACKENDS = ("auto", "torch")
CASES = [
    pytest.param(name, backend, marks=pytest.mark.slow if (place + number) % 2 else ())
    for place, name in enumerate(TINY_MODELS)
    for number, backend in enumerate(BACKENDS)
]


def start(folder: Path, **options: Any) -> LLM:
    """An engine that cuts prompts into chunks, some of them beside decodes."""
    chunks = {"max_num_batched_tokens": 40, "num_gpu_blocks_override": 80, "enable_prefix_caching": False}
    return LLM(folder, **{"device": "cpu", "dtype": "float32", "max_logprobs": -1, **chunks, **options})


def rows_of(output: RequestOutput) -> Tensor:
    """Log probabilities of all tokens behind the first one, of prompt and output."""
    rows: list[Mapping[int, Logprob]] = [row for row in output.prompt_logprobs or () if row is not None]
    rows += output.outputs[0].logprobs or ()
    return torch.tensor([[row[token].logprob for token in range(VOCAB_SIZE)] for row in rows])


@pytest.mark.parametrize(("name", "backend"), CASES)
def test_log_probabilities_are_those_of_transformers(model_of: Callable[..., Path], name: str, backend: str) -> None:
    folder = model_of(name)
    llm, reference = start(folder, attention_backend=backend), reference_model(folder)
    for output in llm.generate(random_prompts([1, 16, 37, 70]), ALL, use_tqdm=False):
        ids = output.prompt_token_ids + output.outputs[0].token_ids
        with torch.inference_mode():
            expected = reference(torch.tensor([ids[:-1]])).logits[0].float().log_softmax(-1)
        torch.testing.assert_close(rows_of(output), expected, atol=TOLERANCE, rtol=0)
    llm.engine.check_invariants()


def test_slopes_are_those_of_transformers() -> None:
    """Also of numbers of heads that are no powers of two, and of another steepness, which `transformers` leaves out."""
    from transformers.models.bloom import modeling_bloom as bloom
    from transformers.models.mpt import modeling_mpt as mpt

    for num_heads in (1, 2, 6, 8, 12, 71):
        expected = bloom.build_alibi_tensor(torch.ones(1, 2), num_heads, torch.float32)[:, 0, 1]
        torch.testing.assert_close(torch.tensor(alibi_slopes(num_heads)), expected, atol=0, rtol=1e-6)
        for largest in (8, 16):
            slopes = -mpt.build_mpt_alibi_tensor(num_heads, 2, largest)[:, 0, 0]
            torch.testing.assert_close(torch.tensor(mpt_slopes(num_heads, largest)), slopes, atol=0, rtol=1e-6)


def test_what_transformers_leaves_out_of_mpt(model_of: Callable[..., Path], tmp_path: Path) -> None:
    """Layer norms of query and key, over all heads, and a factor of the logits."""
    folder, reference = tmp_path / "mpt", reference_model(model_of("mpt"))
    shutil.copytree(model_of("mpt"), folder)
    config = json.loads((folder / "config.json").read_text())
    config["attn_config"]["qk_ln"], config["logit_scale"] = True, "inv_sqrt_d_model"
    (folder / "config.json").write_text(json.dumps(config))
    tensors, size = load_file(folder / "model.safetensors"), reference.config.d_model
    for index, block in enumerate(reference.transformer.blocks):
        weights = [torch.randn(size), torch.randn(size)]
        for name, weight in zip(("q_ln", "k_ln"), weights, strict=True):
            tensors[f"transformer.blocks.{index}.attn.{name}.weight"] = weight
        block.attn.clip_qkv = None

        def normed(module: Any, given: Any, qkv: Tensor, weights: list[Tensor] = weights) -> Tensor:
            *both, value = qkv.clamp(-1.5, 1.5).chunk(3, dim=-1)
            of = zip(both, weights, strict=True)
            return torch.cat((*(F.layer_norm(x, (size,), weight) for x, weight in of), value), dim=-1)

        block.attn.Wqkv.register_forward_hook(normed)
    save_file(tensors, folder / "model.safetensors")
    for output in start(folder).generate(random_prompts([50]), ALL, use_tqdm=False):
        ids = output.prompt_token_ids + output.outputs[0].token_ids
        with torch.inference_mode():
            expected = (reference(torch.tensor([ids[:-1]])).logits[0] * size**-0.5).log_softmax(-1)
        torch.testing.assert_close(rows_of(output), expected, atol=TOLERANCE, rtol=0)


def test_bfloat16_stays_near_float32(llama: Path) -> None:
    found = [
        rows_of(start(llama, dtype=dtype).generate(random_prompts([40]), ALL, use_tqdm=False)[0])[:39]
        for dtype in ("float32", "bfloat16")
    ]
    assert ((found[0] - found[1]).abs().mean() / found[0].abs().mean()) < 0.05


def test_weights_and_pool_take_the_bytes_that_are_reported(model_of: Callable[..., Path]) -> None:
    for name in ("llama", "mixtral", "gemma3"):
        folder = model_of(name)
        llm = start(folder, deterministic=False)
        weights = sum(tensor.numel() for tensor in reference_model(folder).parameters())
        found = llm.engine.memory_bytes()
        assert 4 * weights <= found["model"] <= 4 * (weights + VOCAB_SIZE * 96), "a tied head may be a copy"
        assert found["kv_pool"] > 0


def test_the_pool_holds_what_all_sequences_may_have(llama: Path) -> None:
    engine = Engine(llama, EngineConfig.from_options({"max_num_seqs": 3, "max_model_len": 100, "device": "cpu"}))
    assert engine.stats().num_blocks == 3 * 7


def test_a_context_beyond_the_models_is_refused(llama: Path) -> None:
    with pytest.raises(ConfigError, match="512") as caught:
        start(llama, max_model_len=513)
    assert caught.value.field == "max_model_len"
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="no GPU"):
            start(llama, device="cuda")
