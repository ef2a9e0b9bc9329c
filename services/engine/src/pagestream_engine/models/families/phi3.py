"""Phi-3: Llama whose checkpoint has the fused projections already."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pagestream_engine.models.config import ConfigFile
from pagestream_engine.models.decoder import DecoderConfig, LayerConfig, plain_rope, read_decoder
from pagestream_engine.models.families.llama import Llama
from pagestream_engine.models.weights import LinearWeight, Weight

_OLD_NAMES = ("su", "yarn")
"""What earlier checkpoints call longrope."""


class Phi3(Llama):
    """Abdin et al. 2024, arXiv:2404.14219."""

    architecture = "Phi3ForCausalLM"

    def read(self, file: ConfigFile) -> DecoderConfig:
        file = _with_current_names(file)
        rope = plain_rope(file)
        window = None if file.get("sliding_window") is None else file.whole("sliding_window")
        layers = (LayerConfig(rope, window),) * file.whole("num_hidden_layers")
        return read_decoder(file, file.info(self.architecture, rope.context), layers)

    def attention_weights(self, config: DecoderConfig, prefix: str) -> dict[str, Weight]:
        rows = config.query_size + 2 * config.kv_size
        return {
            "qkv": LinearWeight.of(prefix + "qkv_proj", rows, config.hidden_size),
            "output": LinearWeight.of(prefix + "o_proj", config.hidden_size, config.query_size),
        }

    def mlp_weights(self, config: DecoderConfig, index: int, prefix: str) -> dict[str, Weight]:
        size, hidden = config.intermediate_size, config.hidden_size
        return {
            "gate_up": LinearWeight.of(prefix + "mlp.gate_up_proj", 2 * size, hidden),
            "down": LinearWeight.of(prefix + "mlp.down_proj", hidden, size),
        }


def _with_current_names(file: ConfigFile) -> ConfigFile:
    for name in ("rope_parameters", "rope_scaling"):
        given = file.get(name)
        if isinstance(given, Mapping) and given.get("rope_type", given.get("type")) in _OLD_NAMES:
            return replace(file, fields={**file.fields, name: {**given, "rope_type": "longrope"}})
    return file
