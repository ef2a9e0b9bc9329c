"""What the engine knows of a model: `config.json` and `generation_config.json` of a Hugging Face folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pagestream_engine.errors import DOWNLOAD_AGAIN, ModelFolderError, UnsupportedModel
from pagestream_engine.layers.rope import Rope

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Family:
    """How an architecture differs from Llama."""

    qkv_bias: bool = False
    """Whether q, k and v have a bias where the configuration does not say."""
    output_bias: bool | None = None
    """Whether the attention output has a bias; None follows `attention_bias`."""
    qk_norm: bool = False
    """Whether each head's query and key are normalised before the rotation."""
    window_switch: str | None = None
    """Field that must be true for `sliding_window` to count; None: it always counts."""
    default_window: int | None = None
    """`sliding_window` where the configuration leaves it out."""


FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family(),
    "MistralForCausalLM": Family(output_bias=False, default_window=4096),
    "Qwen2ForCausalLM": Family(qkv_bias=True, output_bias=False, window_switch="use_sliding_window"),
    "Qwen3ForCausalLM": Family(qk_norm=True, window_switch="use_sliding_window"),
}


@dataclass(frozen=True)
class ModelInfo:
    """Shape and numerics of a model."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    """Longest context, in tokens: the model's, or its attention window where that is shorter, since all attention here
    is full attention and the two agree up to the window."""
    rms_norm_eps: float
    rope: Rope
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]
    dtype: torch.dtype
    """As stored; the runner may compute in another."""

    @classmethod
    def from_folder(cls, folder: Path) -> ModelInfo:
        """Read a model folder.

        Raises:
            ModelFolderError: `config.json` is missing, malformed, or lacks a field.
            UnsupportedModel: architecture, activation or rope scaling is none of those that this engine has.
        """
        config = _read_json(folder / "config.json")
        generation = folder / "generation_config.json"
        return parse(config, _read_json(generation) if generation.is_file() else {})

    @property
    def qkv_size(self) -> int:
        """Columns of the fused query, key and value projection."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim


def parse(config: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelInfo:
    """Build a `ModelInfo` from the two files' contents; errors as `ModelInfo.from_folder`."""
    architecture, family = _family(config)
    _check_activation(config)
    num_heads = _whole(config, "num_attention_heads")
    hidden_size = _whole(config, "hidden_size")
    attention_bias = bool(config.get("attention_bias", family.qkv_bias))
    num_kv_heads = _whole(config, "num_key_value_heads", default=num_heads)
    if num_heads % num_kv_heads:
        raise UnsupportedModel(
            f"config.json: num_attention_heads: given {num_heads}, expected a multiple of num_key_value_heads "
            f"({num_kv_heads})"
        )
    return ModelInfo(
        architecture=architecture,
        vocab_size=_whole(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_whole(config, "intermediate_size"),
        num_layers=_whole(config, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=_whole(config, "head_dim", default=hidden_size // num_heads),
        max_position_embeddings=_context(config, family),
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope=_rope(config),
        qkv_bias=attention_bias,
        output_bias=attention_bias if family.output_bias is None else family.output_bias,
        mlp_bias=bool(config.get("mlp_bias", False)),
        qk_norm=family.qk_norm,
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        eos_token_ids=_eos(config, generation or {}),
        dtype=_dtype(config),
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelFolderError(f"{path}: no such file, expected a Hugging Face model folder; check its path") from error
    except (OSError, ValueError) as error:
        raise ModelFolderError(f"{path}: unreadable, expected a JSON object: {error}; {DOWNLOAD_AGAIN}") from error
    if not isinstance(content, dict):
        raise ModelFolderError(f"{path}: given a {type(content).__name__}, expected a JSON object; {DOWNLOAD_AGAIN}")
    return content


def _family(config: Mapping[str, Any]) -> tuple[str, Family]:
    names = config.get("architectures") or []
    for name in names:
        if name in FAMILIES:
            return name, FAMILIES[name]
    raise UnsupportedModel(f"config.json: architectures: given {names!r}, expected one of {', '.join(FAMILIES)}")


def _check_activation(config: Mapping[str, Any]) -> None:
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise UnsupportedModel(f"config.json: hidden_act: given {activation!r}, expected silu")


def _whole(config: Mapping[str, Any], field: str, *, default: int | None = None) -> int:
    value = config.get(field)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelFolderError(f"config.json: {field}: given {value!r}, expected a whole number of at least 1")
    return value


def _context(config: Mapping[str, Any], family: Family) -> int:
    longest = _whole(config, "max_position_embeddings", default=2048)
    if family.window_switch is not None and not config.get(family.window_switch, False):
        return longest
    window = config.get("sliding_window", family.default_window)
    return longest if window is None else min(longest, _whole({"sliding_window": window}, "sliding_window"))


def _rope(config: Mapping[str, Any]) -> Rope:
    """transformers 5 writes one `rope_parameters`, older versions `rope_theta` and `rope_scaling`."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = float(given.get("rope_theta", config.get("rope_theta", 10_000.0)))
    kind = given.get("rope_type", given.get("type", "default"))
    share = float(given.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) or 1.0)
    if share != 1.0:
        raise UnsupportedModel(f"config.json: partial_rotary_factor: given {share:g}, expected 1: a whole head rotates")
    if kind == "default":
        return Rope(theta)
    if kind not in ("linear", "llama3"):
        raise UnsupportedModel(f"config.json: rope scaling: given {kind!r}, expected default, linear or llama3")
    try:
        if kind == "linear":
            return Rope(theta, kind, factor=float(given["factor"]))
        return Rope(
            theta,
            kind,
            factor=float(given["factor"]),
            low_freq_factor=float(given["low_freq_factor"]),
            high_freq_factor=float(given["high_freq_factor"]),
            original_max_position_embeddings=int(given["original_max_position_embeddings"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ModelFolderError(
            f"config.json: rope scaling: given {given!r}, expected the factors of {kind!r}: {error!r}"
        ) from error


def _eos(config: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[int, ...]:
    """generation_config.json wins: it is the one that `generate` follows."""
    for source in (generation, config):
        value = source.get("eos_token_id")
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(token_id, int) and not isinstance(token_id, bool) for token_id in ids):
            raise ModelFolderError(f"eos_token_id: given {value!r}, expected a token id or a list of them")
        return tuple(dict.fromkeys(ids))
    return ()


def _dtype(config: Mapping[str, Any]) -> torch.dtype:
    name = config.get("dtype") or config.get("torch_dtype") or "float32"
    if name not in _DTYPES:
        raise UnsupportedModel(f"config.json: dtype: given {name!r}, expected one of {', '.join(_DTYPES)}")
    return _DTYPES[name]
