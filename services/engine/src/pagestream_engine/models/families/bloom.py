"""BLOOM: a slope of each head in place of positions (ALiBi), and a norm of the embeddings."""

from __future__ import annotations

from collections.abc import Iterator

from pagestream_engine.layers.rope import RopeContext
from pagestream_engine.models.config import ConfigFile
from pagestream_engine.models.decoder import DecoderConfig, LayerConfig, heads, read_decoder
from pagestream_engine.models.gpt import (
    Gpt,
    GptNames,
    alibi_slopes,
    grouped_qkv,
    in_llamas_words,
    with_fields,
    with_shape,
)
from pagestream_engine.models.weights import Part

OWN_NAMES = {"num_hidden_layers": "n_layer", "num_attention_heads": "n_head", "rms_norm_eps": "layer_norm_epsilon"}
_CONTEXT, _MOST = 2048, 1 << 20
"""Tokens that BLOOM was trained with, where a configuration doesn't name them, and that may be asked for: slopes go on
without end."""


class Bloom(Gpt):
    """Le Scao et al. 2022, arXiv:2211.05100."""

    architecture = "BloomForCausalLM"
    names = GptNames(
        embedding="transformer.word_embeddings",
        layers="transformer.h.",
        attention="self_attention.",
        norm="transformer.ln_f",
        input_norm="input_layernorm",
        post_norm="post_attention_layernorm",
        output="dense",
        up="mlp.dense_h_to_4h",
        down="mlp.dense_4h_to_h",
        entry_norm="transformer.word_embeddings_layernorm",
    )

    def read(self, file: ConfigFile) -> DecoderConfig:
        file = in_llamas_words(file, {**OWN_NAMES, "hidden_size": "n_embed"}, rms_norm_eps=1e-5)
        file = with_fields(with_shape(file, 4 * file.whole("hidden_size")), hidden_act="gelu_new")
        context = file.whole("seq_length", file.whole("max_position_embeddings", _CONTEXT))
        return read_decoder(
            file,
            file.info(self.architecture, RopeContext(context, max(context, _MOST))),
            (LayerConfig(None),) * file.whole("num_hidden_layers"),
            qkv_bias=True,
            output_bias=True,
            mlp_bias=True,
            slopes=alibi_slopes(heads(file)[0]),
            normed_residual=file.flag("apply_residual_connection_post_layernorm", False),
            tie_word_embeddings=file.flag("tie_word_embeddings", True),
        )

    def qkv(self, config: DecoderConfig, prefix: str) -> Iterator[Part]:
        return grouped_qkv(config, prefix + "query_key_value")
