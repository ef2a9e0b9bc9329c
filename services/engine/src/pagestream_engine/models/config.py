"""What the engine knows of a model before its weights: `config.json` and `generation_config.json` of its folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from pagestream_engine.errors import ModelFileError, UnsupportedModel
from pagestream_engine.layers.rope import RopeContext
from pagestream_engine.models.defaults import (
    GENERATION_CONFIG,
    end_tokens,
    read_generation_config,
    read_json,
    sampling_defaults,
    tokenizer_end,
)
from pagestream_engine.models.nested import is_nested, language_model
from pagestream_engine.models.published import common_fields

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class ModelInfo:
    """What does not depend on the architecture."""

    architecture: str
    vocab_size: int
    max_position_embeddings: int
    """Longest context, in tokens, unless `max_model_len` asks for more."""
    eos_token_ids: tuple[int, ...]
    dtype: torch.dtype
    """As stored; the runner may compute in another."""
    extended_context: int = 0
    """Longest context that `max_model_len` may ask for, if that is more: it rotates all positions by other
    frequencies (longrope, dynamic)."""
    has_head: bool = True
    """Whether hidden states become logits: a model without its head gives vectors alone."""


@dataclass(frozen=True)
class ConfigFile:
    """The contents of `config.json`, with typed access to its fields."""

    fields: Mapping[str, Any]
    """Of the language model, where the file describes more."""
    generation: Mapping[str, Any] = field(default_factory=dict)
    """Contents of `generation_config.json`."""
    tokenizer_end: int | None = None
    """The tokenizer's own end token."""
    outer: Mapping[str, Any] | None = None
    """Of a checkpoint that has more than a language model; None: `fields` are all."""

    @classmethod
    def read(cls, folder: Path) -> ConfigFile:
        """Read a model folder.

        Raises:
            ModelFileError: a file is missing or malformed, those included that only requests' defaults are read from.
        """
        fields = common_fields(folder, read_json(folder / "config.json"))
        generation = read_generation_config(folder)
        sampling_defaults(generation)
        text = language_model(folder, fields) if is_nested(fields) else None
        if text is not None:
            return cls(text, generation, tokenizer_end(folder), fields)
        return cls(fields, generation, tokenizer_end(folder))

    @property
    def architectures(self) -> list[str]:
        """Names of model classes, the preferred one first."""
        names = self.fields.get("architectures") or []
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ModelFileError(f"config.json: architectures: given {names!r}, expected a list of names")
        return names

    def get(self, name: str, default: Any = None) -> Any:
        """Return a field, or the default where it is missing or null."""
        value = self.fields.get(name)
        return default if value is None else value

    def whole(self, name: str, default: int | None = None) -> int:
        """Return a whole number of at least 1.

        Raises:
            ModelFileError: it is none, or is missing and has no default.
        """
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ModelFileError(f"config.json: {name}: given {value!r}, expected a whole number of at least 1")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Return a number.

        Raises:
            ModelFileError: it is none, or is missing and has no default.
        """
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ModelFileError(f"config.json: {name}: given {value!r}, expected a number")
        return float(value)

    def optional_number(self, name: str) -> float | None:
        """Return a number, or None where it is missing or null."""
        return None if self.get(name) is None else self.number(name)

    def flag(self, name: str, default: bool) -> bool:
        """Return a field as a truth value."""
        return bool(self.get(name, default))

    def info(self, architecture: str, context: RopeContext) -> ModelInfo:
        """Read what does not depend on the architecture, which is named."""
        return ModelInfo(
            architecture=architecture,
            vocab_size=self.whole("vocab_size"),
            max_position_embeddings=context.num_tokens,
            eos_token_ids=self.eos_token_ids(),
            dtype=self.dtype(),
            extended_context=context.extended,
        )

    def eos_token_ids(self, vocab_size: int | None = None) -> tuple[int, ...]:
        """End tokens of `generation_config.json`, `config.json` and the tokenizer together, as in vLLM.

        Args:
            vocab_size: of the model, whose outputs have no other tokens; None: as the configuration says.
        """
        size = self.whole("vocab_size") if vocab_size is None else vocab_size
        ids = [*end_tokens(GENERATION_CONFIG, self.generation), *end_tokens("config.json", self.fields)]
        if self.tokenizer_end is not None:
            ids.append(self.tokenizer_end)
        return tuple(token_id for token_id in dict.fromkeys(ids) if 0 <= token_id < size)

    def dtype(self) -> torch.dtype:
        """Dtype of the weights, as the configuration says."""
        name = self.get("dtype") or self.get("torch_dtype") or "float32"
        if name not in DTYPES:
            raise UnsupportedModel(f"config.json: dtype: given {name!r}, expected one of {', '.join(DTYPES)}")
        return DTYPES[name]
