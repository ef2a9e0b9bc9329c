"""Qwen3: Llama with norms of query and key."""

from __future__ import annotations

from pagestream_engine.models.config import ConfigFile
from pagestream_engine.models.decoder import DecoderConfig, LayerConfig, plain_rope, read_decoder
from pagestream_engine.models.families.llama import Llama
from pagestream_engine.models.families.qwen2 import layer_windows


class Qwen3(Llama):
    """Yang et al. 2025, arXiv:2505.09388."""

    architecture = "Qwen3ForCausalLM"
    has_qk_norm = True

    def read(self, file: ConfigFile) -> DecoderConfig:
        rope = plain_rope(file)
        bias = file.flag("attention_bias", False)
        return read_decoder(
            file,
            file.info(self.architecture, rope.context),
            tuple(LayerConfig(rope, window) for window in layer_windows(file)),
            qkv_bias=bias,
            output_bias=bias,
        )
