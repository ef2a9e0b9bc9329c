"""Gemma 2: norms on both sides of attention and MLP, soft caps, and a window in every other layer."""

from __future__ import annotations

from typing import Any

from pagestream_engine.errors import UnsupportedModel
from pagestream_engine.layers.rope import RopeContext
from pagestream_engine.models.config import ConfigFile
from pagestream_engine.models.decoder import (
    FULL,
    SLIDING,
    DecoderConfig,
    DecoderLayer,
    LayerConfig,
    RmsNorm,
    SandwichNormLayer,
    SelfAttention,
    layer_types,
    plain_rope,
    read_decoder,
)
from pagestream_engine.models.families.llama import DecoderBuilder, Llama
from pagestream_engine.models.weights import TensorWeight, Weight

_NORMS = {
    "input_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "pre_mlp_norm": "pre_feedforward_layernorm",
    "post_mlp_norm": "post_feedforward_layernorm",
}


class Gemma2(Llama):
    """Gemma Team 2024, arXiv:2408.00118."""

    architecture = "Gemma2ForCausalLM"
    default_soft_caps: tuple[float | None, float | None] = (50.0, 30.0)
    """Of the attention scores and of the logits, where the file does not have the fields."""

    def read(self, file: ConfigFile) -> DecoderConfig:
        rope = plain_rope(file)
        default = [FULL if (index + 1) % 2 == 0 else SLIDING for index in range(file.whole("num_hidden_layers"))]
        window = file.whole("sliding_window", 4096)
        layers = tuple(LayerConfig(rope, window if kind == SLIDING else None) for kind in layer_types(file, default))
        return self.read_gemma(file, layers, rope.context)

    def read_gemma(self, file: ConfigFile, layers: tuple[LayerConfig, ...], context: RopeContext) -> DecoderConfig:
        """Read what Gemma 2 and 3 have in common."""
        if file.flag("use_bidirectional_attention", False):
            raise UnsupportedModel("config.json: use_bidirectional_attention: given true, expected false")
        bias = file.flag("attention_bias", False)
        caps: dict[str, Any] = {}
        names = (("soft_cap", "attn_logit_softcapping"), ("logit_soft_cap", "final_logit_softcapping"))
        for (name, field), default in zip(names, self.default_soft_caps, strict=True):
            # Null is no cap; a file without the field means the default of `transformers`.
            caps[name] = file.optional_number(field) if field in file.fields else default
        return read_decoder(
            file,
            file.info(self.architecture, context),
            layers,
            activation="hidden_activation",
            scale=file.number("query_pre_attn_scalar", 256) ** -0.5,
            qkv_bias=bias,
            output_bias=bias,
            tie_word_embeddings=file.flag("tie_word_embeddings", True),
            embedding_scale=file.whole("hidden_size") ** 0.5,
            **caps,
        )

    def norm_weights(self, config: DecoderConfig, prefix: str) -> dict[str, Weight]:
        return {
            name: TensorWeight.of(f"{prefix}{source}.weight", config.hidden_size) for name, source in _NORMS.items()
        }

    def rms_norm(self, builder: DecoderBuilder, name: str) -> RmsNorm:
        # x / rms(x) * (1 + weight), in float32 up to the result.
        weight = builder.parameters.tensor(name).float() + 1.0
        return RmsNorm(weight, builder.config.norm_eps, builder.context.backend.operators)

    def layer(self, builder: DecoderBuilder, index: int, attention: SelfAttention) -> DecoderLayer:
        norms = {name: self.rms_norm(builder, f"{index}.{name}") for name in _NORMS}
        return SandwichNormLayer(attention, self.mlp(builder, index), **norms)
