"""The engines that the kill matrix disturbs: the options of all, and what each of them has for itself."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from support.processes.stack import DEMO_MODEL

NUM_SEATS, NUM_BLOCKS = 8, 56
"""Of an engine: too few for a cell's requests, so that those of class 2 are interrupted, and their blocks evicted."""
ENGINE_OPTIONS = (
    "--deterministic",
    "--enable-lora",
    *("--scheduling-policy", "priority"),
    *("--max-num-seqs", str(NUM_SEATS)),
    *("--num-gpu-blocks-override", str(NUM_BLOCKS)),
    *("--block-size", "16"),
    *("--swap-space", "0.05"),
)
_RANK = 8


class Engines(StrEnum):
    """A set-up's name."""

    PLAIN = "plain"
    INT8_AND_DRAFTS = "int8 and drafts"
    """int8 weights on both engines, and a draft model on one."""
    RANKS = "two ranks"
    """Each engine divides each layer between two processes."""
    STAGES = "two stages"
    """One engine has half of the layers in each of two processes, the other one all in one: the bits are the same."""
    MODELS = "two models"
    """Each engine serves one of two models at a time, and changes it by what waits."""
    INT4 = "4-bit"
    """The demo model as AWQ stores it."""
    FLOAT8 = "fp8 blocks"
    """The demo model in fp8, with a scale for each block of 128 x 128."""
    EXPERTS = "experts"
    """A model of 8 experts, 2 for a token."""


@dataclass(frozen=True)
class Setup:
    """What its two engines have beside ENGINE_OPTIONS and adapters."""

    options: tuple[str, ...]
    """Of both."""
    modes: tuple[tuple[str, ...], tuple[str, ...]]
    """Of the one and the other. They change no token."""
    has_other_model: bool = False
    """Whether they list a second model, which every second row asks for."""
    write_model: Callable[[Path], Path] | None = None
    """Writes the model below a folder, and returns its own; None: it is the demo model."""


_FORMS: Mapping[str, Mapping[str, Any]] = {
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
    "fp8": {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]},
}


def _write_quantised(folder: Path, form: str) -> Path:
    """Write the demo model with quantised projections."""
    from safetensors.torch import load_file, save_file
    from support.engines.published_forms import PACKERS, packer_of

    shutil.copytree(DEMO_MODEL, folder)
    tensors, settings = {}, _FORMS[form]
    for name, tensor in load_file(folder / "model.safetensors").items():
        packer = packer_of(settings, name, tensor)
        packed = {name: tensor} if packer is None else PACKERS[packer](name, tensor.float(), settings)[0]
        tensors.update({each: value.contiguous() for each, value in packed.items()})
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    return folder


def _write_experts(folder: Path) -> Path:
    """Write a Mixtral of random weights with the demo model's tokenizer."""
    import torch
    from transformers import MixtralConfig, MixtralForCausalLM

    demo = json.loads((DEMO_MODEL / "config.json").read_text())
    kept = ("vocab_size", "max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")
    config = MixtralConfig(
        **{name: demo[name] for name in kept},
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=8,
        num_experts_per_tok=2,
        sliding_window=None,
        initializer_range=0.1,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        MixtralForCausalLM(config).save_pretrained(folder)
    for file in DEMO_MODEL.glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder


SETUPS = {
    # Both have two steps in flight, in one process and over two, and one of them speculates.
    Engines.PLAIN: Setup((), (("--async-scheduling",), ("--executor", "process", "--speculative-method", "ngram"))),
    Engines.INT8_AND_DRAFTS: Setup(
        ("--quantization", "int8"),
        (
            ("--executor", "process", "--speculative-method", "grammar"),
            ("--speculative-model", str(DEMO_MODEL), "--num-speculative-tokens", "3"),
        ),
    ),
    Engines.RANKS: Setup(
        ("--tensor-parallel-size", "2"), (("--speculative-method", "grammar"), ("--speculative-method", "ngram"))
    ),
    Engines.STAGES: Setup((), (("--pipeline-parallel-size", "2", "--speculative-method", "ngram"), ())),
    Engines.MODELS: Setup((), ((), ()), has_other_model=True),
    Engines.INT4: Setup(
        (), ((), ("--speculative-method", "ngram")), write_model=lambda folder: _write_quantised(folder, "awq")
    ),
    Engines.FLOAT8: Setup(
        (), ((), ("--speculative-method", "ngram")), write_model=lambda folder: _write_quantised(folder, "fp8")
    ),
    Engines.EXPERTS: Setup((), ((), ("--speculative-method", "ngram")), write_model=_write_experts),
}


def write_other_model(folder: Path) -> Path:
    """Write a model of other weights with the demo model's tokenizer, and return its folder."""
    shutil.copytree(DEMO_MODEL.with_name("draft"), folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_MODEL / name, folder)
    return folder


def write_adapter(folder: Path, model: Path = DEMO_MODEL) -> Path:
    """Write a LoRA adapter of random matrices for a model, in PEFT's format, and return its folder."""
    import torch
    from safetensors.torch import save_file

    config = json.loads((model / "config.json").read_text())
    hidden, width = config["hidden_size"], config["intermediate_size"]
    modules = [("self_attn.o_proj", hidden, hidden)]
    if "num_local_experts" not in config:  # a token's experts take no adapters
        modules.append(("mlp.down_proj", width, hidden))
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for name, num_in, num_out in modules:
            prefix = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(_RANK, num_in, generator=generator) * 0.1
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(num_out, _RANK, generator=generator) * 0.02
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    described = {"peft_type": "LORA", "r": _RANK, "lora_alpha": 2 * _RANK, "target_modules": ["o_proj", "down_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(described))
    return folder
