"""Gemma 3 (text): Gemma 2 with norms of query and key in place of soft caps, and another rotation where a window is."""

from __future__ import annotations

from pagestream_engine.models.config import ConfigFile
from pagestream_engine.models.decoder import (
    FULL,
    SLIDING,
    DecoderConfig,
    LayerConfig,
    layer_types,
    read_rope,
)
from pagestream_engine.models.families.gemma2 import Gemma2

_FULL_THETA, _SLIDING_THETA = 1e6, 10_000.0
_DEFAULT_PATTERN = 6


class Gemma3(Gemma2):
    """Gemma Team 2025, arXiv:2503.19786."""

    architecture = "Gemma3ForCausalLM"
    has_qk_norm = True
    default_soft_caps = (None, None)

    def read(self, file: ConfigFile) -> DecoderConfig:
        given = file.get("rope_parameters") or {
            # Older versions scale the rotation of full layers alone.
            FULL: {**(file.get("rope_scaling") or {}), "rope_theta": file.number("rope_theta", _FULL_THETA)},
            SLIDING: {"rope_theta": file.number("rope_local_base_freq", _SLIDING_THETA)},
        }
        full = read_rope(file, given.get(FULL) or {}, theta=_FULL_THETA)
        sliding = read_rope(file, given.get(SLIDING) or {}, theta=_SLIDING_THETA)
        pattern = file.whole("sliding_window_pattern", file.whole("_sliding_window_pattern", _DEFAULT_PATTERN))
        default = [SLIDING if (index + 1) % pattern else FULL for index in range(file.whole("num_hidden_layers"))]
        window = file.whole("sliding_window", 4096)
        layers = tuple(
            LayerConfig(sliding, window) if kind == SLIDING else LayerConfig(full)
            for kind in layer_types(file, default)
        )
        return self.read_gemma(file, layers, full.context)
