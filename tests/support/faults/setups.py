"""The engines that the kill matrix disturbs: the options of all, and what each of them has for itself."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import torch
from safetensors.torch import save_file
from support.processes.stack import DEMO_MODEL

NUM_SEATS, NUM_BLOCKS = 8, 56
"""Of an engine: too few for a cell's requests, so that those of class 2 are interrupted, and their blocks evicted."""
ENGINE_OPTIONS = (
    "--deterministic",
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


@dataclass(frozen=True)
class Setup:
    """What its two engines have beside ENGINE_OPTIONS."""

    options: tuple[str, ...]
    """Of both."""
    modes: tuple[tuple[str, ...], tuple[str, ...]]
    """Of the one and the other. They change no token."""
    has_adapters: bool = True
    """Whether requests may name an adapter."""


SETUPS = {
    # Both have two steps in flight, in one process and over two, and one of them speculates.
    Engines.PLAIN: Setup(
        ("--enable-lora",), (("--async-scheduling",), ("--executor", "process", "--speculative-method", "ngram"))
    ),
    Engines.INT8_AND_DRAFTS: Setup(
        ("--enable-lora", "--quantization", "int8"),
        (("--executor", "process"), ("--speculative-model", str(DEMO_MODEL), "--num-speculative-tokens", "3")),
    ),
    Engines.RANKS: Setup(("--tensor-parallel-size", "2"), ((), ("--speculative-method", "ngram")), has_adapters=False),
}


def write_adapter(folder: Path) -> Path:
    """Write a LoRA adapter of random matrices for the demo model, in PEFT's format, and return its folder."""
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
