"""Mistral: Llama with an attention window."""

from __future__ import annotations

from pagestream_engine.models.config import ConfigFile
from pagestream_engine.models.decoder import DecoderConfig, LayerConfig, plain_rope, read_decoder
from pagestream_engine.models.families.llama import Llama

_DEFAULT_WINDOW = 4096


class Mistral(Llama):
    """Every layer attends to a window (Jiang et al. 2023, arXiv:2310.06825)."""

    architecture = "MistralForCausalLM"

    def read(self, file: ConfigFile) -> DecoderConfig:
        rope = plain_rope(file)
        # Null is no window; a file without the field means the default of `transformers`.
        window = file.fields.get("sliding_window", _DEFAULT_WINDOW)
        if window is not None:
            window = file.whole("sliding_window", _DEFAULT_WINDOW)
        layers = (LayerConfig(rope, window),) * file.whole("num_hidden_layers")
        return read_decoder(file, file.info(self.architecture, rope.context), layers)
