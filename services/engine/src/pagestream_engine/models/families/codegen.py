"""CodeGen: GPT-J with one projection for query, value and key, in four parts that once were on four chips."""

from __future__ import annotations

from collections.abc import Iterator

from pagestream_engine.errors import UnsupportedModel
from pagestream_engine.models.config import ConfigFile
from pagestream_engine.models.decoder import DecoderConfig
from pagestream_engine.models.families.gptj import GptJ
from pagestream_engine.models.weights import Part

_CHIPS = 4


class CodeGen(GptJ):
    """Nijkamp et al. 2022, arXiv:2203.13474."""

    architecture = "CodeGenForCausalLM"

    def read(self, file: ConfigFile) -> DecoderConfig:
        config = super().read(file)
        if config.num_heads % _CHIPS:
            raise UnsupportedModel(f"config.json: n_head: given {config.num_heads}, expected a multiple of {_CHIPS}")
        return config

    def qkv(self, config: DecoderConfig, prefix: str) -> Iterator[Part]:
        rows = config.query_size // _CHIPS
        for section in (0, 2, 1):  # each part has query, value, key
            for part in range(_CHIPS):
                yield Part(prefix + "qkv_proj", rows, (3 * part + section) * rows, 3 * config.query_size)
