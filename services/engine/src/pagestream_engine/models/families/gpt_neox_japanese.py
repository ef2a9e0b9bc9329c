"""GPT-NeoX Japanese: no biases but one, of the last layer's attention."""

from __future__ import annotations

from collections.abc import Iterator

from pagestream_engine.attention import AttentionSpec
from pagestream_engine.models.config import ConfigFile
from pagestream_engine.models.decoder import DecoderConfig, LayerConfig, SelfAttention, plain_rope, read_decoder
from pagestream_engine.models.families.llama import DecoderBuilder
from pagestream_engine.models.gpt import Gpt, GptNames, grouped_qkv, in_llamas_words, with_shape
from pagestream_engine.models.weights import Part, TensorWeight, Weight

_OWN_NAMES = {
    "rms_norm_eps": "layer_norm_eps",
    "rope_theta": "rotary_emb_base",
    "partial_rotary_factor": "rotary_pct",
}
_BIAS = "output_bias"


class GptNeoXJapanese(Gpt):
    """Sawada et al. 2022, github.com/tanreinama/GPTNEOX_japanese."""

    architecture = "GPTNeoXJapaneseForCausalLM"
    names = GptNames(
        embedding="gpt_neox_japanese.embed_in",
        layers="gpt_neox_japanese.layers.",
        attention="attention.",
        norm="gpt_neox_japanese.final_layer_norm",
        head="embed_out",
        input_norm="input_layernorm",
        post_norm="post_attention_layernorm",
        output="dense",
        up="mlp.dense_h_to_4h",
        down="mlp.dense_4h_to_h",
    )

    def read(self, file: ConfigFile) -> DecoderConfig:
        file = in_llamas_words(file, _OWN_NAMES, rms_norm_eps=1e-5, hidden_act="gelu")
        file = with_shape(file, file.whole("intermediate_multiple_size", 4) * file.whole("hidden_size"))
        rope = plain_rope(file)
        return read_decoder(
            file,
            file.info(self.architecture, rope.context),
            (LayerConfig(rope),) * file.whole("num_hidden_layers"),
            tie_word_embeddings=file.flag("tie_word_embeddings", True),
        )

    def weights(self, config: DecoderConfig) -> dict[str, Weight]:
        last = len(config.layers) - 1
        name = f"{self.names.layers}{last}.attention.dense_bias"
        return {**super().weights(config), f"{last}.{_BIAS}": TensorWeight.of(name, config.hidden_size)}

    def qkv(self, config: DecoderConfig, prefix: str) -> Iterator[Part]:
        return grouped_qkv(config, prefix + "query_key_value")

    def attention(self, builder: DecoderBuilder, index: int, spec: AttentionSpec) -> SelfAttention:
        attention = super().attention(builder, index, spec)
        attention.output.bias = builder.parameters.find_tensor(f"{index}.{_BIAS}")
        return attention
