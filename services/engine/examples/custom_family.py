"""A model family of one's own: Granite, which is Llama with four constants, on fused layers.

.venv/bin/python services/engine/examples/custom_family.py MODEL_FOLDER
PYTHONPATH=services/engine/examples .venv/bin/pagestream serve MODEL_FOLDER --plugins custom_family
"""

import sys
from dataclasses import dataclass, replace
from typing import cast

from pagestream_engine import LLM, SamplingParams
from pagestream_engine.models.config import ConfigFile
from pagestream_engine.models.decoder import (
    DecoderConfig,
    DecoderLayer,
    DecoderStep,
    PreNormLayer,
    SelfAttention,
    add_and_norm,
)
from pagestream_engine.models.families.llama import DecoderBuilder, Llama
from pagestream_engine.models.registry import register_family
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ScaledLayer(PreNormLayer):
    """A Llama layer that scales what it adds to the residual stream."""

    factor: float = 1.0

    def forward(
        self, x: Tensor | None, residual: Tensor, step: DecoderStep, wanted: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """As `DecoderLayer.forward`."""
        x, residual = add_and_norm(self.input_norm, x, residual)
        x = self.attention.attend(x, step)
        if wanted is not None:
            x, residual = x[wanted], residual[wanted]
        x, residual = self.post_norm.add(self.attention.output(x) * self.factor, residual)
        return self.mlp(x) * self.factor, residual


@dataclass(frozen=True)
class GraniteConfig(DecoderConfig):
    """A decoder with a constant of Granite's own; it has the other three already."""

    residual_multiplier: float = 1.0


class Granite(Llama):
    """Reads the constants, and builds the layers with one of them; the weights are Llama's.

    A family is registered once and reads any number of models: what it reads is kept in the configuration it returns.
    """

    architecture = "GraniteForCausalLM"

    def read(self, file: ConfigFile) -> GraniteConfig:
        """Read the configuration."""
        config = replace(
            super().read(file),
            scale=file.number("attention_multiplier", 1.0),
            embedding_scale=file.number("embedding_multiplier", 1.0),
            logit_scale=1.0 / file.number("logits_scaling", 1.0),
        )
        return GraniteConfig(**vars(config), residual_multiplier=file.number("residual_multiplier", 1.0))

    def layer(self, builder: DecoderBuilder, index: int, attention: SelfAttention) -> DecoderLayer:
        """Build a layer."""
        plain = super().layer(builder, index, attention)
        factor = cast(GraniteConfig, builder.config).residual_multiplier
        return ScaledLayer(plain.attention, plain.mlp, plain.input_norm, plain.post_norm, factor)


register_family("GraniteForCausalLM", Granite())

if __name__ == "__main__":
    print(LLM(sys.argv[1]).generate([[1, 2, 3]], SamplingParams(max_tokens=8))[0].outputs[0].token_ids)
