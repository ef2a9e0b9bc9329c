"""XGLM: embeddings that are scaled, and sines and cosines of positions added to them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pagestream_engine.layers.rope import RopeContext
from pagestream_engine.models.config import ConfigFile
from pagestream_engine.models.decoder import DecoderConfig, LayerConfig, read_decoder
from pagestream_engine.models.families.llama import DecoderBuilder
from pagestream_engine.models.gpt import TORCH_EPS, Gpt, GptNames, in_llamas_words, with_fields, with_shape

_OWN_NAMES = {
    "hidden_size": "d_model",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "attention_heads",
}
_FIRST = 2
"""Row of position 0."""


class Xglm(Gpt):
    """Lin et al. 2021, arXiv:2112.10668."""

    architecture = "XGLMForCausalLM"
    names = GptNames(
        attention="self_attn.",
        norm="model.layer_norm",
        input_norm="self_attn_layer_norm",
        post_norm="final_layer_norm",
        up="fc1",
        down="fc2",
    )

    def read(self, file: ConfigFile) -> DecoderConfig:
        file = with_fields(in_llamas_words(file, _OWN_NAMES, activation_function="gelu"), rms_norm_eps=TORCH_EPS)
        file = with_shape(file, file.whole("ffn_dim"))
        context = file.whole("max_position_embeddings", 2048)
        scale = file.whole("hidden_size") ** 0.5 if file.flag("scale_embedding", True) else None
        return read_decoder(
            file,
            file.info(self.architecture, RopeContext(context, context)),
            (LayerConfig(None),) * file.whole("num_hidden_layers"),
            activation="activation_function",
            qkv_bias=True,
            output_bias=True,
            mlp_bias=True,
            embedding_scale=scale,
            tie_word_embeddings=file.flag("tie_word_embeddings", True),
            padding_token=file.get("pad_token_id", 1),
        )

    def positions(self, builder: DecoderBuilder) -> Tensor | None:
        size, embedding = builder.config.hidden_size, builder.parameters.tensor("embedding")
        frequencies = torch.exp(torch.arange(size // 2).float() * -(math.log(10_000) / (size // 2 - 1)))
        angles = torch.arange(builder.context.max_model_len + _FIRST).float()[:, None] * frequencies
        table = torch.cat((angles.sin(), angles.cos(), torch.zeros(len(angles), size % 2)), dim=1)
        table[builder.config.padding_token] = 0.0
        return table[_FIRST:].to(embedding)
