"""Falcon: one projection for query, key and value with few KV heads, attention and MLP in parallel, after a norm each
(40B), one (7B), or one after the other with a slope of each head in place of a rotation (RW)."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from pagestream_engine.layers.rope import RopeContext
from pagestream_engine.models.config import ConfigFile
from pagestream_engine.models.decoder import DecoderConfig, LayerConfig, head_size, plain_rope, read_decoder
from pagestream_engine.models.families.bloom import OWN_NAMES
from pagestream_engine.models.gpt import Gpt, GptNames, alibi_slopes, grouped_qkv, in_llamas_words, with_shape
from pagestream_engine.models.weights import Part, Weight


class Falcon(Gpt):
    """Almazrouei et al. 2023, arXiv:2311.16867."""

    architecture = "FalconForCausalLM"
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
    )

    def read(self, file: ConfigFile) -> DecoderConfig:
        file = in_llamas_words(file, {**OWN_NAMES, "hidden_size": "n_embed"}, rms_norm_eps=1e-5, activation="gelu")
        num_heads, is_new = file.whole("num_attention_heads"), file.flag("new_decoder_architecture", False)
        kv_heads = 1 if file.flag("multi_query", True) else num_heads
        if is_new:
            kv_heads = file.whole("num_kv_heads", file.whole("n_head_kv", num_heads))
        file = with_shape(file, file.whole("ffn_hidden_size", 4 * file.whole("hidden_size")), kv_heads)
        bias, is_parallel = file.flag("bias", False), is_new or file.flag("parallel_attn", True)
        num_norms = 1 if is_parallel else 2
        if is_new:
            num_norms = file.whole("num_ln_in_parallel_attn", 2)
        rope, slopes = plain_rope(file), None
        if file.flag("alibi", False):
            # They were trained rounded so, and scaled like the products that they are added to: by a power of two where
            # heads have 16, 64 or 256 elements, which changes no rounding.
            rounded = torch.tensor(alibi_slopes(num_heads)).bfloat16().tolist()
            slopes = tuple(slope * head_size(file) ** -0.5 for slope in rounded)
        context = RopeContext(*[file.whole("max_position_embeddings", 2048)] * 2) if slopes else rope.context
        return read_decoder(
            file,
            file.info(self.architecture, context),
            (LayerConfig(None if slopes else rope),) * file.whole("num_hidden_layers"),
            activation="activation",
            qkv_bias=bias,
            output_bias=bias,
            mlp_bias=bias,
            slopes=slopes,
            rounds_slopes=slopes is not None,
            is_parallel=is_parallel,
            num_norms=num_norms,
            tie_word_embeddings=file.flag("tie_word_embeddings", True),
        )

    def norm_weights(self, config: DecoderConfig, prefix: str) -> dict[str, Weight]:
        if not config.is_parallel or config.num_norms == 1:
            return super().norm_weights(config, prefix)
        of_attention = self.norm_weight(config, "input_norm", prefix + "ln_attn")
        return {**of_attention, **self.norm_weight(config, "post_norm", prefix + "ln_mlp")}

    def qkv(self, config: DecoderConfig, prefix: str) -> Iterator[Part]:
        return grouped_qkv(config, prefix + "query_key_value")
