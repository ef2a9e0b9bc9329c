"""Llama, and what its relatives have in common with it: what is read and how it is put together.

The forward pass is in `models/decoder.py`: `DecoderModel.forward`, `PreNormLayer.forward`, `SelfAttention.attend`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from pagestream_engine.attention import AttentionSpec, HeadNorm, PagedAttention
from pagestream_engine.errors import InvariantViolation
from pagestream_engine.models.config import ConfigFile
from pagestream_engine.models.decoder import (
    DecoderConfig,
    DecoderLayer,
    DecoderModel,
    Entry,
    GatedMlp,
    HeadsNorm,
    LayerConfig,
    Mlp,
    Norm,
    PreNormLayer,
    RmsNorm,
    SelfAttention,
    plain_rope,
    read_decoder,
)
from pagestream_engine.models.model import Model
from pagestream_engine.models.registry import BuildContext, Family
from pagestream_engine.models.weights import LinearWeight, Parameters, Part, TensorWeight, TiedWeight, Weight, WeightMap
from pagestream_engine.parallel.rank import layers_of_stage


@dataclass(frozen=True, slots=True)
class Names:
    """What a checkpoint calls the parts of a decoder; those of a layer follow its index."""

    embedding: str = "model.embed_tokens"
    layers: str = "model.layers."
    attention: str = "self_attn."
    norm: str = "model.norm"
    head: str = "lm_head"


@dataclass(frozen=True, slots=True)
class DecoderBuilder:
    """What the parts of one model are built from."""

    config: DecoderConfig
    parameters: Parameters
    context: BuildContext

    def gated_mlp(self, prefix: str) -> GatedMlp:
        """Build the gated MLP whose parameters have a prefix."""
        gate_up, down = self.parameters.linear(prefix + "gate_up"), self.parameters.linear(prefix + "down")
        return GatedMlp(gate_up, down, self.config.activation, self.context.backend.operators)


class Llama(Family[DecoderConfig]):
    """Pre-norm decoder with gated MLPs (Touvron et al. 2023, arXiv:2302.13971)."""

    architecture = "LlamaForCausalLM"
    names = Names()
    has_qk_norm = False
    """Whether each head's query and key are normalised before the rotation."""

    def read(self, file: ConfigFile) -> DecoderConfig:
        rope = plain_rope(file)
        bias = file.flag("attention_bias", False)
        return read_decoder(
            file,
            file.info(self.architecture, rope.context),
            (LayerConfig(rope),) * file.whole("num_hidden_layers"),
            qkv_bias=bias,
            output_bias=bias,
            mlp_bias=file.flag("mlp_bias", False),
        )

    def weights(self, config: DecoderConfig) -> WeightMap:
        names = self.names
        weights: dict[str, Weight] = {
            "embedding": TensorWeight.of(f"{names.embedding}.weight", config.info.vocab_size, config.hidden_size),
            **self.entry_weights(config),
        }
        for index in range(len(config.layers)):
            prefix = f"{names.layers}{index}."
            parts = {
                **self.norm_weights(config, prefix),
                **self.attention_weights(config, prefix + names.attention),
                **self.mlp_weights(config, index, prefix),
            }
            weights.update({f"{index}.{name}": weight for name, weight in parts.items()})
        weights.update(self.norm_weight(config, "norm", names.norm))
        weights["head"] = self.head_weight(config)
        return weights

    def attention_specs(self, config: DecoderConfig, max_model_len: int) -> Sequence[AttentionSpec]:
        return [
            AttentionSpec(
                num_heads=config.num_heads,
                num_kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                scale=config.scale,
                window=window_within(layer.window, max_model_len),
                soft_cap=config.soft_cap,
                slopes=None if config.slopes is None else torch.tensor(config.slopes, dtype=torch.float32),
                rounds_slopes=config.rounds_slopes,
            )
            for layer in config.layers
        ]

    def build(
        self, config: DecoderConfig, parameters: Parameters, specs: Sequence[AttentionSpec], context: BuildContext
    ) -> Model:
        builder = DecoderBuilder(config, parameters, context)
        stage = context.stage
        own = layers_of_stage(len(specs), stage.index, stage.count)
        layers = {index: self.layer(builder, index, self.attention(builder, index, specs[index])) for index in own}
        norm = self.norm(builder, "norm") if stage.is_last else None
        entry = self.entry(builder) if stage.is_first else None
        return DecoderModel(config, parameters, layers, norm, context.backend.operators, stage=stage, entry=entry)

    def entry_weights(self, config: DecoderConfig) -> dict[str, Weight]:
        """Declare what embeddings meet before the first layer."""
        return {}

    def entry(self, builder: DecoderBuilder) -> Entry | None:
        """Build what embeddings meet before the first layer."""
        return None

    def norm_weight(self, config: DecoderConfig, name: str, source: str) -> dict[str, Weight]:
        """Declare a norm of the hidden state, which the checkpoint calls `source`."""
        return {name: TensorWeight.of(f"{source}.weight", config.hidden_size)}

    def norm_weights(self, config: DecoderConfig, prefix: str) -> dict[str, Weight]:
        """Declare a layer's norms."""
        return {
            **self.norm_weight(config, "input_norm", prefix + "input_layernorm"),
            **self.norm_weight(config, "post_norm", prefix + "post_attention_layernorm"),
        }

    def attention_weights(self, config: DecoderConfig, prefix: str) -> dict[str, Weight]:
        """Declare a layer's attention."""
        qkv = (
            Part(prefix + "q_proj", config.query_size),
            Part(prefix + "k_proj", config.kv_size),
            Part(prefix + "v_proj", config.kv_size),
        )
        weights: dict[str, Weight] = {
            "qkv": LinearWeight(qkv, config.hidden_size, config.qkv_bias),
            "output": LinearWeight.of(
                prefix + "o_proj", config.hidden_size, config.query_size, bias=config.output_bias
            ),
        }
        if self.has_qk_norm:
            weights["q_norm"] = TensorWeight.of(prefix + "q_norm.weight", config.head_dim)
            weights["k_norm"] = TensorWeight.of(prefix + "k_norm.weight", config.head_dim)
        return weights

    def mlp_weights(self, config: DecoderConfig, index: int, prefix: str) -> dict[str, Weight]:
        """Declare a layer's MLP."""
        return gated_mlp_weights(config, prefix + "mlp.")

    def head_weight(self, config: DecoderConfig) -> Weight:
        """Declare the head."""
        if config.tie_word_embeddings:
            return TiedWeight("embedding")
        return LinearWeight.of(self.names.head, config.info.vocab_size, config.hidden_size)

    def norm(self, builder: DecoderBuilder, name: str) -> Norm:
        """Build a norm."""
        return self.rms_norm(builder, name)

    def rms_norm(self, builder: DecoderBuilder, name: str) -> RmsNorm:
        """Build an RMS norm."""
        return RmsNorm(builder.parameters.tensor(name), builder.config.norm_eps, builder.context.backend.operators)

    def attention(self, builder: DecoderBuilder, index: int, spec: AttentionSpec) -> SelfAttention:
        """Build a layer's attention."""
        backend, rope = builder.context.backend, builder.config.layers[index].rope
        if spec.slopes is not None:
            spec = replace(spec, slopes=spec.slopes.to(backend.store.device))
        return SelfAttention(
            qkv=builder.parameters.linear(f"{index}.qkv"),
            output=builder.parameters.linear(f"{index}.output"),
            attention=PagedAttention(backend, index, spec),
            rotation=None if rope is None else builder.context.rotation(rope),
            norm=self.head_norm(builder, index) if self.has_qk_norm else None,
            layer_norms=self.layer_norms(builder, index) if builder.config.qk_norm else None,
            bound=builder.config.qkv_bound,
        )

    def layer_norms(self, builder: DecoderBuilder, index: int) -> tuple[HeadsNorm, HeadsNorm]:
        """Build a layer's layer norms of query and key."""
        raise InvariantViolation(f"{self.architecture}: given layer norms of query and key, expected none")

    def head_norm(self, builder: DecoderBuilder, index: int) -> HeadNorm:
        """Build a layer's norm of query and key."""
        query, key = self.rms_norm(builder, f"{index}.q_norm"), self.rms_norm(builder, f"{index}.k_norm")
        return HeadNorm(query.weight, key.weight, query.eps)

    def layer(self, builder: DecoderBuilder, index: int, attention: SelfAttention) -> DecoderLayer:
        """Build a layer."""
        return PreNormLayer(
            attention=attention,
            mlp=self.mlp(builder, index),
            input_norm=self.norm(builder, f"{index}.input_norm"),
            post_norm=self.norm(builder, f"{index}.post_norm"),
        )

    def mlp(self, builder: DecoderBuilder, index: int) -> Mlp:
        """Build a layer's MLP."""
        return builder.gated_mlp(f"{index}.")


def gated_mlp_weights(config: DecoderConfig, prefix: str) -> dict[str, Weight]:
    """Declare a gated MLP whose gate and up projections are two tensors."""
    size, hidden = config.intermediate_size, config.hidden_size
    gate_up = (Part(prefix + "gate_proj", size), Part(prefix + "up_proj", size))
    return {
        "gate_up": LinearWeight(gate_up, hidden, config.mlp_bias),
        "down": LinearWeight.of(prefix + "down_proj", hidden, size, bias=config.mlp_bias),
    }


def window_within(window: int | None, max_model_len: int) -> int | None:
    """Return a window that hides something from some sequence; None for one as long as any."""
    return None if window is None or window >= max_model_len else window
