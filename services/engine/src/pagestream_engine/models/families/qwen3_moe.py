"""Qwen3-MoE: Qwen3 with mixtures of experts."""

from __future__ import annotations

from pagestream_engine.errors import ModelFileError
from pagestream_engine.models.config import ConfigFile
from pagestream_engine.models.decoder import (
    DecoderConfig,
    ExpertsConfig,
    LayerConfig,
    Mlp,
    plain_rope,
    read_decoder,
)
from pagestream_engine.models.families.llama import DecoderBuilder, Llama
from pagestream_engine.models.families.mixtral import experts_weights, mixture
from pagestream_engine.models.weights import Weight


class Qwen3Moe(Llama):
    """Yang et al. 2025, arXiv:2505.09388."""

    architecture = "Qwen3MoeForCausalLM"
    has_qk_norm = True

    def read(self, file: ConfigFile) -> DecoderConfig:
        rope = plain_rope(file)
        bias = file.flag("attention_bias", False)
        window = file.whole("sliding_window", 4096) if file.flag("use_sliding_window", False) else None
        experts = ExpertsConfig(
            num_experts=file.whole("num_experts", file.get("num_local_experts")),
            experts_per_token=file.whole("num_experts_per_tok", 8),
            intermediate_size=file.whole("moe_intermediate_size", 768),
            normalises=file.flag("norm_topk_prob", False),
        )
        return read_decoder(
            file,
            file.info(self.architecture, rope.context),
            tuple(LayerConfig(rope, window, is_sparse) for is_sparse in _sparse_layers(file)),
            qkv_bias=bias,
            output_bias=bias,
            experts=experts,
        )

    def mlp_weights(self, config: DecoderConfig, index: int, prefix: str) -> dict[str, Weight]:
        if not config.layers[index].is_sparse:
            return super().mlp_weights(config, index, prefix)
        return experts_weights(config, prefix + "mlp.", gate="gate_proj", up="up_proj", down="down_proj")

    def mlp(self, builder: DecoderBuilder, index: int) -> Mlp:
        if not builder.config.layers[index].is_sparse:
            return super().mlp(builder, index)
        return mixture(builder, f"{index}.")


def _sparse_layers(file: ConfigFile) -> list[bool]:
    """Whether each layer has experts: every `decoder_sparse_step`th, but not those of `mlp_only_layers`."""
    dense = file.get("mlp_only_layers", [])
    if not isinstance(dense, list):
        raise ModelFileError(f"config.json: mlp_only_layers: given {dense!r}, expected a list of layers")
    step = file.whole("decoder_sparse_step", 1)
    return [index not in dense and (index + 1) % step == 0 for index in range(file.whole("num_hidden_layers"))]
