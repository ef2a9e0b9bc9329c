"""GPT-J: attention and MLP in parallel after one norm, neighbours of a head's first elements turn together."""

from __future__ import annotations

from pagestream_engine.models.config import ConfigFile
from pagestream_engine.models.decoder import DecoderConfig, LayerConfig, read_decoder
from pagestream_engine.models.gpt import Gpt, GptNames, in_llamas_words, interleaved_rope, with_shape

OWN_NAMES = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
    "rms_norm_eps": "layer_norm_epsilon",
}
_ROTARY_DIM = 64


class GptJ(Gpt):
    """Wang and Komatsuzaki 2021, github.com/kingoflolz/mesh-transformer-jax."""

    architecture = "GPTJForCausalLM"
    names = GptNames(embedding="transformer.wte", layers="transformer.h.", attention="attn.", norm="transformer.ln_f")
    head_bias = True

    def read(self, file: ConfigFile) -> DecoderConfig:
        file = in_llamas_words(file, OWN_NAMES, activation_function="gelu_new", rms_norm_eps=1e-5)
        file = with_shape(file, file.whole("n_inner", 4 * file.whole("hidden_size")))
        rope = interleaved_rope(file, _ROTARY_DIM)
        return read_decoder(
            file,
            file.info(self.architecture, rope.context),
            (LayerConfig(rope),) * file.whole("num_hidden_layers"),
            activation="activation_function",
            mlp_bias=True,
            is_parallel=True,
            num_norms=1,
        )
