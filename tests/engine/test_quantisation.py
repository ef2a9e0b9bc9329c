"""Quantised models against the same models with the weights that the quantised ones stand for."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pagestream_engine import (
    LLM,
    ConfigError,
    EngineConfig,
    LoRARequest,
    SamplingParams,
    UnsupportedModel,
    WeightsError,
    size_model,
)
from pagestream_engine.native_build import find_compiler
from safetensors.torch import load_file, save_file
from support.engines.architectures import VOCAB_SIZE, small_config, write_model
from support.engines.general_parity import check_parity, references
from support.engines.lora_adapters import make_adapter
from support.engines.quantised_checkpoints import FORMS, write, write_mxfp4
from support.engines.tiny_models import make_model, random_prompts

pytestmark = pytest.mark.served

OPTIONS = {"dtype": "float32", "device": "cpu", "num_gpu_blocks_override": 64, "max_logprobs": 5}
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1)
PROMPTS = [[5, 9, 5, 9, 5, 9, 5], *([token % VOCAB_SIZE for token in prompt] for prompt in random_prompts([3, 40]))]
TOLERANCE = 2e-4
"""Of log probabilities in float32, whose sums are grouped otherwise."""
KEPT = (".gate.weight", "embed_tokens.weight", "wte.weight", "wpe.weight")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def generate(
    folder: Path, params: SamplingParams = GREEDY, adapter: LoRARequest | None = None, **options: Any
) -> list[tuple[list[int], list[float]]]:
    """Return each output's tokens, and their log probabilities."""
    llm = LLM(str(folder), **{**OPTIONS, **options})
    answers = [answer.outputs[0] for answer in llm.generate(PROMPTS, params, lora_request=adapter)]
    llm.engine.close()
    return [
        (
            list(answer.token_ids),
            [at[token].logprob for token, at in zip(answer.token_ids, answer.logprobs or (), strict=False)],
        )
        for answer in answers
    ]


def check_equal(got: list[tuple[list[int], list[float]]], expected: list[tuple[list[int], list[float]]]) -> None:
    """Compare tokens, and log probabilities within the tolerance."""
    assert [tokens for tokens, _ in got] == [tokens for tokens, _ in expected]
    for (_, these), (_, those) in zip(got, expected, strict=True):
        assert these == pytest.approx(those, abs=TOLERANCE)


def rounded(weight: torch.Tensor) -> torch.Tensor:
    """Round a weight to 8 bits with one scale for each output: its largest magnitude / 127."""
    scales = weight.abs().amax(dim=1, keepdim=True) / 127
    return (weight / scales).round() * scales


def dequantised_copy(folder: Path, target: Path) -> Path:
    """Write a model whose linears have the weights that int8 makes of them."""
    target.mkdir()
    tensors = {
        name: tensor if tensor.dim() < 2 or name.endswith(KEPT) else rounded(tensor)
        for name, tensor in load_file(folder / "model.safetensors").items()
    }
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    for path in folder.iterdir():
        if path.name != "model.safetensors":
            (target / path.name).write_bytes(path.read_bytes())
    return target


@pytest.mark.parametrize("name", ["qwen2", "mixtral", "phi", pytest.param("llama", marks=pytest.mark.slow)])
def test_int8_made_while_loading(tmp_path: Path, name: str) -> None:
    """`phi` has no family: its linears are those of transformers' code, which are replaced."""
    folder = tmp_path / "model"
    if name == "phi":
        write_model(folder, small_config("phi"))
    else:
        make_model(folder, name)
    expected = generate(dequantised_copy(folder, tmp_path / "dequantised"))
    got = generate(folder, quantization="int8")
    check_equal(got, expected)
    plain = generate(folder)
    assert all(these[1] != pytest.approx(those[1], abs=1e-5) for these, those in zip(got, plain, strict=True))


def test_memory_and_fingerprint(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", "llama", hidden_size=192, intermediate_size=384)
    engines = [LLM(str(folder), **OPTIONS, **options).engine for options in ({}, {"quantization": "int8"})]
    plain, quantised = (engine.memory_bytes()["model"] for engine in engines)
    fingerprints = {engine.fingerprint for engine in engines}
    for engine in engines:
        engine.close()
    embedding = 331 * 192 * 4
    assert quantised - embedding < 0.3 * (plain - embedding)
    assert len(fingerprints) == 2


def test_drafts_beams_batches_and_shared_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_model(tmp_path / "model", "llama")
    expected = generate(folder, quantization="int8")
    assert generate(folder, quantization="int8", speculative_method="ngram") == expected
    beams = SamplingParams(temperature=0, max_tokens=4, use_beam_search=True, beam_width=2)
    reference = dequantised_copy(folder, tmp_path / "dequantised")
    found = generate(folder, beams, quantization="int8")
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in generate(reference, beams)]
    if find_compiler() is None:
        return
    monkeypatch.setattr("pagestream_engine.models.loader.weights_folder", lambda: tmp_path / "weights")
    for _ in range(2):
        shared = generate(folder, quantization="int8", deterministic=True, shared_weights_gb=1)
        assert shared == expected
    assert len(list((tmp_path / "weights").glob("*.weights"))) == 1


@pytest.fixture(scope="module")
def folder(model_of: Callable[..., Path]) -> Path:
    """A model whose matrices have whole groups and words; projections of queries, keys and values have biases."""
    shape = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 192}
    return model_of("qwen2", **shape)


@pytest.mark.parametrize("form", FORMS)
def test_a_quantised_checkpoint(form: str, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    quantised, plain = write(folder, tmp_path, form)
    with caplog.at_level(logging.WARNING):
        got = generate(quantised, quantization=None)
    check_equal(got, generate(plain))
    of_weights_alone = {"awq", "gptq", "gptq_v2", "compressed-tensors", "nf4"} & set(re.split(r"[ ,]", form))
    has_activations = form.endswith("W8A8") or not of_weights_alone
    assert ("activations, which are not quantised here" in caplog.text) == has_activations
    sized = size_model(quantised, EngineConfig.from_options({"dtype": "float32"}))
    named = FORMS[form][1]["quant_method"]  # as vLLM takes it
    engine = LLM(str(quantised), **OPTIONS, quantization=named).engine
    assert engine.memory_bytes()["model"] == pytest.approx(sized.weight_bytes, rel=0.35)
    engine.close()


@pytest.mark.slow
@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize(("form", "size"), [("awq", 2), ("fp8", 4), ("fp8, blocks", 2), ("compressed-tensors int4", 4)])
def test_ranks_give_the_tokens_of_a_quantised_checkpoint(form: str, size: int, folder: Path, tmp_path: Path) -> None:
    quantised, _ = write(folder, tmp_path, form)
    check_equal(generate(quantised, tensor_parallel_size=size), generate(quantised))


GENERAL_FORMS = [
    ("phi", "awq"),
    ("deepseek_v3", "fp8, blocks"),
    *(
        pytest.param(kind, form, marks=pytest.mark.slow)
        for kind, form in (
            ("glm4", "gptq, desc_act"),
            ("olmo2", "compressed-tensors int4"),
            ("smollm3", "modelopt"),
            ("phi", "compressed-tensors int8, W8A8"),
            ("phi", "bitsandbytes nf4, nested"),
            ("olmo2", "modelopt nvfp4"),
        )
    ),
]


@pytest.mark.parametrize(("kind", "form"), GENERAL_FORMS)
def test_a_quantised_checkpoint_without_a_family(kind: str, form: str, tmp_path: Path) -> None:
    """Its linears stay in their bits where the modelling code does nothing with them but call them."""
    model = _general_model(tmp_path / "model", kind)
    quantised, plain = write(model, tmp_path, form)
    sizes = [check_parity(folder, references(plain)).engine.memory_bytes()["model"] for folder in (quantised, plain)]
    assert sizes[0] < 0.9 * sizes[1]


def test_gpt_oss_as_it_is_published(tmp_path: Path) -> None:
    """`transformers` computes the same folder, from floats that its own code makes of the blocks."""
    plain = _general_model(tmp_path / "model", "gpt_oss")
    expected = check_parity(plain).engine.memory_bytes()["model"]
    found = check_parity(write_mxfp4(plain, tmp_path / "mxfp4")).engine.memory_bytes()["model"]
    experts = sum(x.nbytes for name, x in load_file(plain / "model.safetensors").items() if name.endswith("_proj"))
    assert expected - found > 0.6 * experts


def test_experts_in_one_tensor_of_8_bits_are_named(tmp_path: Path) -> None:
    quantised, _ = write(_general_model(tmp_path / "model", "gpt_oss"), tmp_path, "fp8")
    with pytest.raises(UnsupportedModel, match=r"experts\.\w+_proj\.weight: given 3 dimensions, expected two"):
        LLM(str(quantised), **OPTIONS)


def _general_model(folder: Path, kind: str) -> Path:
    config = small_config(kind)
    write_model(folder, config)
    return folder


def test_adapters_add_to_quantised_linears(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", "llama", intermediate_size=128)
    reference = dequantised_copy(folder, tmp_path / "dequantised")
    adapter = LoRARequest("one", 1, str(make_adapter(folder, tmp_path / "adapter", seed=1)))
    check_equal(
        generate(folder, adapter=adapter, enable_lora=True, quantization="int8"),
        generate(reference, adapter=adapter, enable_lora=True),
    )


def test_shared_files_and_drafts_of_a_checkpoint(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if find_compiler() is None:
        pytest.skip("no C++ compiler")
    quantised, _ = write(folder, tmp_path, "gptq, desc_act")
    expected = generate(quantised)
    monkeypatch.setattr("pagestream_engine.models.loader.weights_folder", lambda: tmp_path / "weights")
    for _ in range(2):
        assert generate(quantised, deterministic=True, shared_weights_gb=1, speculative_method="ngram") == expected
    assert len(list((tmp_path / "weights").glob("*.weights"))) == 1


REFUSED = {
    "quant_method: given hqq, expected one of awq, bits": {"quant_method": "hqq"},
    "load_in_4bit, load_in_8bit: given False, False, expected one": {"quant_method": "bitsandbytes"},
    "version: given gemv, expected gemm": {"quant_method": "awq", "bits": 4, "version": "gemv"},
    "bits: given 3, expected 4": {"quant_method": "gptq", "bits": 3},
    "weight_block_size: given [128], expected two whole": {"quant_method": "fp8", "weight_block_size": [128]},
    "weight_block_size: given [128, 9], expected an even": {"quant_method": "fp8", "weight_block_size": [128, 9]},
    "quant_algo: given W4A8_AWQ, expected FP8 or NVFP4": {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"},
    "config_groups.group_0.format: given marlin-24, expected one of pack": {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"weights": {"num_bits": 4}, "format": "marlin-24"}},
    },
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_has_no_reader_is_refused_by_name(message: str, folder: Path, tmp_path: Path) -> None:
    quantised, _ = write(folder, tmp_path, "awq")
    _set_config(quantised, REFUSED[message])
    with pytest.raises(UnsupportedModel, match=re.escape(f"quantization_config.{message}")):
        LLM(str(quantised), **OPTIONS)


def test_tensors_that_contradict_the_configuration(folder: Path, tmp_path: Path) -> None:
    quantised, plain = write(folder, tmp_path, "awq")
    with pytest.raises(ConfigError, match=r"quantization: given 'int8', expected None for a checkpoint .* by awq"):
        LLM(str(quantised), **OPTIONS, quantization="int8")
    with pytest.raises(ConfigError, match="cpu_offload_gb: given 'more', expected 0 for a checkpoint"):
        size_model(quantised, EngineConfig.from_options({"cpu_offload_gb": 1.0}))
    configuration = FORMS["awq"][1]
    _set_config(plain, configuration)
    with pytest.raises(WeightsError, match="given floats alone, expected some that are quantised by awq"):
        LLM(str(plain), **OPTIONS)
    _set_config(quantised, {**configuration, "group_size": 64})
    with pytest.raises(WeightsError, match=r"q_proj\.qzeros: given shape \(4, 16\), expected \(2, 16\)"):
        LLM(str(quantised), **OPTIONS)
    _set_config(quantised, None)
    with pytest.raises(WeightsError, match=r"q_proj\.weight: missing"):
        LLM(str(quantised), **OPTIONS)


def _set_config(folder: Path, quantization: dict[str, Any] | None) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
