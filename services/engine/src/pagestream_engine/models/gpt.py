"""What decoders of layer norms and MLPs without gates have in common: GPT-J, BLOOM, Falcon and their like."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pagestream_engine.errors import UnsupportedModel
from pagestream_engine.layers.rope import Rope
from pagestream_engine.models.config import ConfigFile
from pagestream_engine.models.decoder import (
    DecoderConfig,
    DecoderLayer,
    Entry,
    LayerNorm,
    Mlp,
    Norm,
    NormedResidualLayer,
    ParallelLayer,
    PlainMlp,
    SelfAttention,
    head_size,
)
from pagestream_engine.models.families.llama import DecoderBuilder, Llama, Names
from pagestream_engine.models.weights import BIAS, LinearWeight, Part, TensorWeight, Weight

TORCH_EPS = 1e-5
"""Of a layer norm of torch that is given none."""


@dataclass(frozen=True, slots=True)
class GptNames(Names):
    """What a checkpoint calls the parts of such a decoder."""

    input_norm: str = "ln_1"
    post_norm: str = "ln_2"
    output: str = "out_proj"
    up: str = "mlp.fc_in"
    down: str = "mlp.fc_out"
    positions: str | None = None
    """Of a learned embedding of positions."""
    entry_norm: str | None = None
    """Of a norm of the embeddings."""


class LayerNormed(Llama):
    """A decoder whose norms are layer norms."""

    norm_biases = True

    def norm_weight(self, config: DecoderConfig, name: str, source: str) -> dict[str, Weight]:
        weights: dict[str, Weight] = {name: TensorWeight.of(f"{source}.weight", config.hidden_size)}
        if self.norm_biases:
            weights[name + BIAS] = TensorWeight.of(f"{source}.bias", config.hidden_size)
        return weights

    def norm(self, builder: DecoderBuilder, name: str) -> Norm:
        parameters = builder.parameters
        weight, bias = parameters.tensor(name), parameters.find_tensor(name + BIAS)
        return LayerNorm(weight, bias, builder.config.norm_eps, builder.context.backend.operators)

    def layer(self, builder: DecoderBuilder, index: int, attention: SelfAttention) -> DecoderLayer:
        config, mlp = builder.config, self.mlp(builder, index)
        input_norm = self.norm(builder, f"{index}.input_norm")
        post_norm = self.norm(builder, f"{index}.post_norm") if config.num_norms == 2 else None
        if config.is_parallel:
            return ParallelLayer(attention, mlp, input_norm, post_norm)
        if config.normed_residual and post_norm is not None:
            return NormedResidualLayer(attention, mlp, input_norm, post_norm)
        return super().layer(builder, index, attention)


class Gpt(LayerNormed):
    """A decoder of layer norms and MLPs without gates; a family says its names and how query, key and value lie."""

    names: GptNames
    first_position = 0
    """Row of position 0 in the learned embedding of positions."""
    mlp_biases = True
    head_bias = False

    def entry_weights(self, config: DecoderConfig) -> dict[str, Weight]:
        weights: dict[str, Weight] = {}
        if self.names.positions is not None:
            rows = config.info.max_position_embeddings + self.first_position
            weights["positions"] = TensorWeight.of(f"{self.names.positions}.weight", rows, config.hidden_size)
        if self.names.entry_norm is not None:
            weights.update(self.norm_weight(config, "entry_norm", self.names.entry_norm))
        return weights

    def entry(self, builder: DecoderBuilder) -> Entry | None:
        positions = self.positions(builder)
        norm = None if self.names.entry_norm is None else self.norm(builder, "entry_norm")
        return None if positions is None and norm is None else Entry(positions, norm)

    def positions(self, builder: DecoderBuilder) -> Tensor | None:
        """Return what is added to an embedding, (positions, hidden_size); None: nothing."""
        table = builder.parameters.find_tensor("positions")
        return None if table is None else table[self.first_position :]

    def norm_weights(self, config: DecoderConfig, prefix: str) -> dict[str, Weight]:
        weights = self.norm_weight(config, "input_norm", prefix + self.names.input_norm)
        if config.num_norms == 2:
            weights.update(self.norm_weight(config, "post_norm", prefix + self.names.post_norm))
        return weights

    def attention_weights(self, config: DecoderConfig, prefix: str) -> dict[str, Weight]:
        qkv = LinearWeight(tuple(self.qkv(config, prefix)), config.hidden_size, config.qkv_bias)
        name = prefix + self.names.output
        output = LinearWeight.of(name, config.hidden_size, config.query_size, bias=config.output_bias)
        return {"qkv": qkv, "output": output}

    def qkv(self, config: DecoderConfig, prefix: str) -> Iterator[Part]:
        """Yield what fills the rows of query, key and value, in this order."""
        yield Part(prefix + "q_proj", config.query_size)
        yield Part(prefix + "k_proj", config.kv_size)
        yield Part(prefix + "v_proj", config.kv_size)

    def mlp_weights(self, config: DecoderConfig, index: int, prefix: str) -> dict[str, Weight]:
        size, hidden, bias = config.intermediate_size, config.hidden_size, config.mlp_bias
        return {
            "up": LinearWeight.of(prefix + self.names.up, size, hidden, bias=bias),
            "down": LinearWeight.of(prefix + self.names.down, hidden, size, bias=bias),
        }

    def mlp(self, builder: DecoderBuilder, index: int) -> Mlp:
        up, down = builder.parameters.linear(f"{index}.up"), builder.parameters.linear(f"{index}.down")
        return PlainMlp(up, down, builder.config.activation, builder.context.backend.operators)

    def head_weight(self, config: DecoderConfig) -> Weight:
        if not self.head_bias:
            return super().head_weight(config)
        if config.tie_word_embeddings:
            raise UnsupportedModel("config.json: tie_word_embeddings: given true, expected false: the head has a bias")
        return LinearWeight.of(self.names.head, config.info.vocab_size, config.hidden_size, bias=True)


def grouped_qkv(config: DecoderConfig, name: str) -> Iterator[Part]:
    """Yield the parts of one projection in which each KV head's query heads come before its key and its value."""
    size, group = config.head_dim, config.num_heads // config.num_kv_heads
    rows = (config.num_heads + 2 * config.num_kv_heads) * size
    for first, count in ((0, group), (group, 1), (group + 1, 1)):
        for head in range(config.num_kv_heads):
            yield Part(name, count * size, (head * (group + 2) + first) * size, rows)


def in_llamas_words(file: ConfigFile, names: Mapping[str, str], **defaults: Any) -> ConfigFile:
    """Return a configuration with its fields under Llama's names, too.

    Args:
        names: Llama's name of a field, and its own. A file may have it under either.
        defaults: of fields that the file does not have.
    """
    own = {name: file.fields[given] for name, given in names.items() if file.get(given) is not None}
    missing = {name: value for name, value in defaults.items() if name not in own and file.get(name) is None}
    return with_fields(file, **own, **missing)


def with_shape(file: ConfigFile, intermediate_size: int, num_kv_heads: int | None = None) -> ConfigFile:
    """Return a configuration with sizes that such a decoder derives from others, whatever else the file may say.

    Args:
        intermediate_size: of the MLP.
        num_kv_heads: None for one of each head.

    Raises:
        UnsupportedModel: the heads don't fill the hidden size.
    """
    hidden_size, num_heads = file.whole("hidden_size"), file.whole("num_attention_heads")
    if hidden_size % num_heads:
        raise UnsupportedModel(f"config.json: heads: given {num_heads}, expected a divisor of {hidden_size}")
    return with_fields(
        file,
        head_dim=hidden_size // num_heads,
        num_key_value_heads=num_kv_heads or num_heads,
        intermediate_size=intermediate_size,
    )


def with_fields(file: ConfigFile, **fields: Any) -> ConfigFile:
    """Return a configuration with other fields."""
    return replace(file, fields={**file.fields, **fields})


def interleaved_rope(file: ConfigFile, default: int) -> Rope:
    """Read the rotation of GPT-J and CodeGen: neighbours in the first `rotary_dim` elements turn together."""
    head_dim = head_size(file)
    rotary_dim = file.whole("rotary_dim", default) if "rotary_dim" not in file.fields else file.get("rotary_dim")
    rotary_dim = head_dim if rotary_dim is None else file.whole("rotary_dim")
    if rotary_dim > head_dim or rotary_dim % 2:
        raise UnsupportedModel(
            f"config.json: rotary_dim: given {rotary_dim}, expected an even number of at most {head_dim}, a head's size"
        )
    return Rope(
        head_dim=head_dim,
        max_position_embeddings=file.whole("max_position_embeddings", 2048),
        share=math.nextafter(rotary_dim / head_dim, 2.0),  # so that their product is not cut off below
        interleaved=True,
    )


def alibi_slopes(num_heads: int) -> tuple[float, ...]:
    """Return the slope of each head (Press et al. 2021, arXiv:2108.12409): powers of two where the number of heads is
    one, and every second one of twice as many for the heads beyond the last power of two."""
    whole = 2 ** math.floor(math.log2(num_heads))
    slopes = [_power(whole, index + 1) for index in range(whole)]
    return tuple(slopes + [_power(2 * whole, 2 * index + 1) for index in range(num_heads - whole)])


def _power(count: int, index: int) -> float:
    """Return the slope of one of so many heads, as float32 has it."""
    base = torch.tensor(2.0 ** -(2.0 ** -(math.log2(count) - 3)), dtype=torch.float32)
    return float(base.pow(index))
