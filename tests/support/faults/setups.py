"""The engines that the kill matrix disturbs: the options of all, and what each of them has for itself."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

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


@dataclass(frozen=True)
class Setup:
    """What its two engines have beside ENGINE_OPTIONS and adapters."""

    options: tuple[str, ...]
    """Of both."""
    modes: tuple[tuple[str, ...], tuple[str, ...]]
    """Of the one and the other. They change no token."""
    has_other_model: bool = False
    """Whether they list a second model, which every second row asks for."""


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
}


def write_other_model(folder: Path) -> Path:
    """Write a model of other weights with the demo model's tokenizer, and return its folder."""
    shutil.copytree(DEMO_MODEL.with_name("draft"), folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_MODEL / name, folder)
    return folder


def write_adapter(folder: Path) -> Path:
    """Write a LoRA adapter of random matrices for the demo model, in PEFT's format, and return its folder."""
    import torch
    from safetensors.torch import save_file

    config = json.loads((DEMO_MODEL / "config.json").read_text())
    hidden, width = config["hidden_size"], config["intermediate_size"]
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for name, num_in, num_out in (("self_attn.o_proj", hidden, hidden), ("mlp.down_proj", width, hidden)):
            prefix = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(_RANK, num_in, generator=generator) * 0.1
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(num_out, _RANK, generator=generator) * 0.02
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    described = {"peft_type": "LORA", "r": _RANK, "lora_alpha": 2 * _RANK, "target_modules": ["o_proj", "down_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(described))
    return folder
