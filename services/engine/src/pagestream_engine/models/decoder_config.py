"""Shape and numerics of a decoder, and how `config.json` spells what the fused families have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pagestream_engine.errors import ModelFileError, UnsupportedModel
from pagestream_engine.layers.linear import Activation
from pagestream_engine.layers.rope import ROPE_KINDS, Rope
from pagestream_engine.models.config import ConfigFile, ModelInfo

_ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
}
SLIDING, FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True)
class LayerConfig:
    """What differs between the layers of one model."""

    rope: Rope
    window: int | None = None
    """Most tokens that a query token sees, itself included; None: all."""
    is_sparse: bool = False
    """Whether its MLP is a mixture of experts."""


@dataclass(frozen=True)
class ExpertsConfig:
    """Shape of a mixture of experts."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    normalises: bool
    """Whether the weights of a token's experts are divided by their sum."""


@dataclass(frozen=True)
class DecoderConfig:
    """One model of a fused family."""

    info: ModelInfo
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    layers: tuple[LayerConfig, ...]
    activation: Activation
    scale: float
    """Factor of the products of query and key."""
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    soft_cap: float | None = None
    """Bound of the attention scores."""
    logit_soft_cap: float | None = None
    """Bound of the logits."""
    embedding_scale: float | None = None
    """Factor of the embeddings; None is 1."""
    logit_scale: float | None = None
    """Factor of the logits, before their bound; None is 1."""
    experts: ExpertsConfig | None = None

    @property
    def query_size(self) -> int:
        """Columns of the query projection."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Columns of the key projection, and of the value projection."""
        return self.num_kv_heads * self.head_dim


def read_decoder(
    config: ConfigFile,
    info: ModelInfo,
    layers: tuple[LayerConfig, ...],
    *,
    activation: str = "hidden_act",
    scale: float | None = None,
    **differences: Any,
) -> DecoderConfig:
    """Read the fields that all fused families spell alike.

    Args:
        layers: one for each layer.
        activation: name of the field that has the MLP's activation.
        scale: of the attention; None is `head_dim ** -0.5`.
        differences: fields of `DecoderConfig` that are this family's own.

    Raises:
        ModelFileError: a field is missing or malformed.
        UnsupportedModel: the activation or the heads are none that this engine has.
    """
    num_heads, num_kv_heads = heads(config)
    head_dim = head_size(config)
    return DecoderConfig(
        info=info,
        hidden_size=config.whole("hidden_size"),
        intermediate_size=config.whole("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        norm_eps=config.number("rms_norm_eps", 1e-6),
        layers=layers,
        activation=_activation(config, activation),
        scale=head_dim**-0.5 if scale is None else scale,
        **{"tie_word_embeddings": config.flag("tie_word_embeddings", False), **differences},
    )


def heads(config: ConfigFile) -> tuple[int, int]:
    """Number of query heads and of KV heads."""
    num_heads = config.whole("num_attention_heads")
    num_kv_heads = config.whole("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise UnsupportedModel(
            f"config.json: num_attention_heads: given {num_heads}, expected a multiple of num_key_value_heads "
            f"({num_kv_heads})"
        )
    return num_heads, num_kv_heads


def head_size(config: ConfigFile) -> int:
    """Elements of a head."""
    return config.whole("head_dim", config.whole("hidden_size") // config.whole("num_attention_heads"))


def layer_types(config: ConfigFile, default: list[str]) -> list[str]:
    """One of SLIDING and FULL for each layer: the field `layer_types`, or the default."""
    types = config.get("layer_types", default)
    num_layers = config.whole("num_hidden_layers")
    if not isinstance(types, list) or len(types) != num_layers:
        raise ModelFileError(f"config.json: layer_types: given {types!r:.80}, expected a list of {num_layers} names")
    unknown = sorted({str(name) for name in types} - {SLIDING, FULL})
    if unknown:
        raise UnsupportedModel(f"config.json: layer_types: given {unknown[0]!r}, expected {SLIDING} or {FULL}")
    return types


def plain_rope(config: ConfigFile, *, theta: float = 10_000.0) -> Rope:
    """Read the one rotation of all layers. `transformers` 5 writes one `rope_parameters`, older versions `rope_theta`
    and `rope_scaling`.

    Args:
        theta: base where the file has none.
    """
    return read_rope(config, config.get("rope_parameters") or config.get("rope_scaling") or {}, theta=theta)


def read_rope(config: ConfigFile, given: Any, *, theta: float) -> Rope:
    """Read a rotation from its parameters; fields of the whole file stand in for those that are missing.

    Raises:
        ModelFileError: it is malformed.
        UnsupportedModel: `transformers` has no such scaling.
    """
    if not isinstance(given, Mapping):
        raise ModelFileError(f"config.json: rope scaling: given {given!r}, expected a JSON object")
    kind = given.get("rope_type", given.get("type", "default"))
    if kind not in ROPE_KINDS:
        raise UnsupportedModel(f"config.json: rope scaling: given {kind!r}, expected one of {', '.join(ROPE_KINDS)}")
    own = ConfigFile(given)
    context = config.whole("max_position_embeddings", 2048)
    scaling = {name: value for name, value in given.items() if name not in _ROPE_FIELDS}
    if kind in _RELATIVE_KINDS:
        original = config.get("original_max_position_embeddings") or given.get("original_max_position_embeddings")
        scaling["original_max_position_embeddings"] = original or context
    return Rope(
        head_dim=head_size(config),
        theta=own.number("rope_theta", config.number("rope_theta", theta)),
        kind=kind,
        max_position_embeddings=context,
        share=own.number("partial_rotary_factor", config.number("partial_rotary_factor", 1.0)),
        scaling=scaling,
    )


_ROPE_FIELDS = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
_RELATIVE_KINDS = ("llama3", "yarn", "longrope")
"""Scalings that are relative to `original_max_position_embeddings`."""


def _activation(config: ConfigFile, field: str) -> Activation:
    name = config.get(field, "silu")
    if name not in _ACTIVATIONS:
        raise UnsupportedModel(f"config.json: {field}: given {name!r}, expected one of {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]
