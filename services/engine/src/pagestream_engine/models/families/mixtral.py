"""Mixtral: Mistral with a mixture of experts in every layer."""

from __future__ import annotations

from pagestream_engine.layers.experts import MixtureOfExperts
from pagestream_engine.models.config import ConfigFile
from pagestream_engine.models.decoder import (
    DecoderConfig,
    ExpertsConfig,
    LayerConfig,
    Mlp,
    plain_rope,
    read_decoder,
)
from pagestream_engine.models.families.llama import DecoderBuilder, Llama
from pagestream_engine.models.weights import LinearWeight, Part, Weight

_DEFAULT_THETA, _DEFAULT_CONTEXT = 1e6, 131072


class Mixtral(Llama):
    """Jiang et al. 2024, arXiv:2401.04088."""

    architecture = "MixtralForCausalLM"

    def read(self, file: ConfigFile) -> DecoderConfig:
        rope = plain_rope(file, theta=_DEFAULT_THETA)
        window = None if file.get("sliding_window") is None else file.whole("sliding_window")
        layers = (LayerConfig(rope, window, is_sparse=True),) * file.whole("num_hidden_layers")
        experts = ExpertsConfig(
            num_experts=file.whole("num_local_experts", 8),
            experts_per_token=file.whole("num_experts_per_tok", 2),
            intermediate_size=file.whole("intermediate_size"),
            normalises=True,
        )
        return read_decoder(file, file.info(self.architecture, rope.context), layers, experts=experts)

    def mlp_weights(self, config: DecoderConfig, index: int, prefix: str) -> dict[str, Weight]:
        return experts_weights(config, prefix + "block_sparse_moe.", gate="w1", up="w3", down="w2")

    def mlp(self, builder: DecoderBuilder, index: int) -> Mlp:
        return mixture(builder, f"{index}.")


def experts_weights(config: DecoderConfig, prefix: str, *, gate: str, up: str, down: str) -> dict[str, Weight]:
    """Declare a router and its experts, whose projections have these names in the checkpoint."""
    experts = experts_of(config)
    size, hidden = experts.intermediate_size, config.hidden_size
    gates = (Part(prefix + "gate", experts.num_experts),)
    weights: dict[str, Weight] = {"router": LinearWeight(gates, hidden, is_sensitive=True)}
    for expert in range(experts.num_experts):
        own = f"{prefix}experts.{expert}."
        weights[f"experts.{expert}.gate_up"] = LinearWeight((Part(own + gate, size), Part(own + up, size)), hidden)
        weights[f"experts.{expert}.down"] = LinearWeight.of(own + down, hidden, size)
    return weights


def mixture(builder: DecoderBuilder, prefix: str) -> Mlp:
    """Build the mixture of experts whose parameters have a prefix. Ranks hold a part of each expert, and add up what
    comes of all."""
    shape = experts_of(builder.config)
    linear, numbers = builder.parameters.linear, range(shape.num_experts)
    experts_of_rank = MixtureOfExperts(
        linear(prefix + "router"),
        [linear(f"{prefix}experts.{expert}.gate_up") for expert in numbers],
        [linear(f"{prefix}experts.{expert}.down") for expert in numbers],
        builder.config.activation,
        builder.context.backend.operators,
        experts_per_token=shape.experts_per_token,
        normalises=shape.normalises,
    )
    ranks = builder.context.ranks
    return experts_of_rank if ranks.size == 1 else lambda x: ranks.sum(experts_of_rank(x))


def experts_of(config: DecoderConfig) -> ExpertsConfig:
    """Return the shape of the experts of a model that has some."""
    if config.experts is None:
        raise ValueError(f"{config.info.architecture}: given no experts, expected their number and size")
    return config.experts
