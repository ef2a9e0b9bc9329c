"""LoRA adapters with random weights for the small models: PEFT makes them, merges them and computes the reference."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from support.engines.tiny_models import reference_model

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]


def make_adapter(model: Path, folder: Path, *, seed: int = 0, **config: Any) -> Path:
    """Write an adapter for a model with PEFT, both matrices random, and return its folder.

    Args:
        model: folder of the model.
        folder: of the adapter.
        seed: of the matrices.
        config: of `peft.LoraConfig`; by default rank 8 for all linears of a Llama.
    """
    import peft

    settings = {"r": 8, "lora_alpha": 16, "target_modules": [*ATTENTION, *MLP], **config}
    with warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        adapted = peft.get_peft_model(reference_model(model), peft.LoraConfig(task_type="CAUSAL_LM", **settings))
        for name, parameter in adapted.named_parameters():
            if ".lora_" in name:
                torch.nn.init.normal_(parameter, std=0.05 if ".lora_B" in name else 0.3)
        adapted.save_pretrained(str(folder))
    return folder


def merged_model(model: Path, folder: Path) -> Any:
    """Load a model with `transformers`, with an adapter's product added to its weights by PEFT."""
    import peft

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return peft.PeftModel.from_pretrained(reference_model(model), str(folder)).merge_and_unload().eval()
