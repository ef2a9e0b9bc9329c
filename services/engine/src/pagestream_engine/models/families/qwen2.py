"""Qwen2: Llama with biases of query, key and value, and windows in the upper layers where they are switched on."""

from __future__ import annotations

from pagestream_engine.models.config import ConfigFile
from pagestream_engine.models.decoder import (
    FULL,
    SLIDING,
    DecoderConfig,
    LayerConfig,
    layer_types,
    plain_rope,
    read_decoder,
)
from pagestream_engine.models.families.llama import Llama

_DEFAULT_WINDOW, _DEFAULT_FULL_LAYERS = 4096, 28


class Qwen2(Llama):
    """Yang et al. 2024, arXiv:2407.10671."""

    architecture = "Qwen2ForCausalLM"

    def read(self, file: ConfigFile) -> DecoderConfig:
        rope = plain_rope(file)
        return read_decoder(
            file,
            file.info(self.architecture, rope.context),
            tuple(LayerConfig(rope, window) for window in layer_windows(file)),
            qkv_bias=True,
        )


def layer_windows(file: ConfigFile) -> list[int | None]:
    """Window of each layer: those from `max_window_layers` on have one, where `use_sliding_window` is true."""
    num_layers, window = file.whole("num_hidden_layers"), None
    if file.flag("use_sliding_window", False):
        window = file.whole("sliding_window", _DEFAULT_WINDOW)
    first = file.get("max_window_layers", _DEFAULT_FULL_LAYERS)
    default = [SLIDING if window is not None and index >= first else FULL for index in range(num_layers)]
    return [window if kind == SLIDING else None for kind in layer_types(file, default)]
