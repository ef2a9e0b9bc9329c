"""GPT-Neo: learned positions, unscaled scores, and a window in every other layer."""

from __future__ import annotations

from pagestream_engine.errors import ModelFileError, UnsupportedModel
from pagestream_engine.layers.rope import RopeContext
from pagestream_engine.models.config import ConfigFile
from pagestream_engine.models.decoder import DecoderConfig, LayerConfig, read_decoder
from pagestream_engine.models.gpt import Gpt, GptNames, in_llamas_words, with_shape

_OWN_NAMES = {
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "rms_norm_eps": "layer_norm_epsilon",
}
_GLOBAL, _LOCAL = "global", "local"
_DEFAULT_TYPES = [[[_GLOBAL, _LOCAL], 12]]


class GptNeo(Gpt):
    """Black et al. 2021, github.com/EleutherAI/gpt-neo."""

    architecture = "GPTNeoForCausalLM"
    names = GptNames(
        embedding="transformer.wte",
        layers="transformer.h.",
        attention="attn.attention.",
        norm="transformer.ln_f",
        up="mlp.c_fc",
        down="mlp.c_proj",
        positions="transformer.wpe",
    )

    def read(self, file: ConfigFile) -> DecoderConfig:
        file = in_llamas_words(
            file, _OWN_NAMES, rms_norm_eps=1e-5, activation_function="gelu_new", max_position_embeddings=2048
        )
        file = with_shape(file, file.whole("intermediate_size", 4 * file.whole("hidden_size")))
        window, context = file.whole("window_size", 256), file.whole("max_position_embeddings")
        return read_decoder(
            file,
            file.info(self.architecture, RopeContext(context, context)),
            tuple(LayerConfig(None, window if kind == _LOCAL else None) for kind in _types(file)),
            activation="activation_function",
            scale=1.0,
            output_bias=True,
            mlp_bias=True,
            tie_word_embeddings=file.flag("tie_word_embeddings", True),
        )


def _types(file: ConfigFile) -> list[str]:
    """One of _GLOBAL and _LOCAL for each layer: `attention_types` has names, and how often they come."""
    given, num_layers = file.get("attention_types", _DEFAULT_TYPES), file.whole("num_hidden_layers")
    try:
        types = [str(kind) for kinds, count in given for _ in range(count) for kind in kinds]
    except (TypeError, ValueError):
        types = []
    if len(types) != num_layers:
        raise ModelFileError(
            f"config.json: attention_types: given {given!r:.80}, expected names and counts of {num_layers} layers"
        )
    unknown = sorted({*types} - {_GLOBAL, _LOCAL})
    if unknown:
        raise UnsupportedModel(f"config.json: attention_types: given {unknown[0]!r}, expected {_GLOBAL} or {_LOCAL}")
    return types
