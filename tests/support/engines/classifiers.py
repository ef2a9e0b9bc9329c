"""Tiny models with scores of labels, as `transformers` writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from support.engines.tiny_models import TINY_MODELS, make_model, write_tokenizer


def make_classifier(folder: Path, name: str, num_labels: int, **changes: Any) -> Path:
    """Write a tiny model of a family with scores of labels."""
    make_model(folder, name)
    config = getattr(transformers, TINY_MODELS[name].config_class).from_pretrained(folder)
    config.num_labels, config.pad_token_id = num_labels, 0
    for field, value in changes.items():
        setattr(config, field, value)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = transformers.AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    with torch.no_grad():
        model.score.weight.mul_(20)
    model.save_pretrained(folder)
    write_tokenizer(folder, config.vocab_size)
    return folder
