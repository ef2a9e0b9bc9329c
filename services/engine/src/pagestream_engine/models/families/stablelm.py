"""StableLM: Llama with layer norms, a rotation of a part of each head, and in StableLM 2 norms of query and key, or
attention and MLP in parallel."""

from __future__ import annotations

from pagestream_engine.models.config import ConfigFile
from pagestream_engine.models.decoder import DecoderConfig, HeadsNorm, LayerConfig, LayerNorm, plain_rope, read_decoder
from pagestream_engine.models.families.llama import DecoderBuilder
from pagestream_engine.models.gpt import LayerNormed, in_llamas_words, with_shape
from pagestream_engine.models.weights import Part, TensorWeight, Weight

_SHARE = 0.25
"""Of a head that turns, where the file has none."""


class StableLm(LayerNormed):
    """Bellagente et al. 2024, arXiv:2402.17834."""

    architecture = "StableLmForCausalLM"

    def read(self, file: ConfigFile) -> DecoderConfig:
        names = {"rms_norm_eps": "layer_norm_eps", "partial_rotary_factor": "rope_pct"}
        file = in_llamas_words(file, names, rms_norm_eps=1e-5, partial_rotary_factor=_SHARE)
        kv_heads = file.whole("num_key_value_heads", file.whole("num_attention_heads"))
        file = with_shape(file, file.whole("intermediate_size"), kv_heads)
        rope = plain_rope(file)
        is_parallel = file.flag("use_parallel_residual", False)
        return read_decoder(
            file,
            file.info(self.architecture, rope.context),
            (LayerConfig(rope),) * file.whole("num_hidden_layers"),
            qkv_bias=file.flag("use_qkv_bias", False),
            qk_norm="head" if file.flag("qk_layernorm", False) else None,
            is_parallel=is_parallel,
            num_norms=1 if is_parallel else 2,
        )

    def norm_weights(self, config: DecoderConfig, prefix: str) -> dict[str, Weight]:
        weights = super().norm_weights(config, prefix)
        return {name: each for name, each in weights.items() if config.num_norms == 2 or "post_norm" not in name}

    def attention_weights(self, config: DecoderConfig, prefix: str) -> dict[str, Weight]:
        weights = super().attention_weights(config, prefix)
        if config.qk_norm:
            for name, source, count in (("q_norm", "q", config.num_heads), ("k_norm", "k", config.num_kv_heads)):
                stem = f"{prefix}{source}_layernorm.norms."
                parts = [Part(f"{stem}{head}.weight", config.head_dim) for head in range(count)]
                weights[name] = TensorWeight(tuple(parts))
        return weights

    def layer_norms(self, builder: DecoderBuilder, index: int) -> tuple[HeadsNorm, HeadsNorm]:
        ranks, config = builder.context.ranks, builder.config
        norms = []
        for name, own in (("q_norm", config.num_heads), ("k_norm", config.num_kv_heads)):
            weight = builder.parameters.tensor(f"{index}.{name}").view(-1, config.head_dim)  # of all ranks' heads
            first = ranks.rank * len(weight) // ranks.size
            weight = weight[first : first + own].contiguous()
            norms.append(LayerNorm(weight, None, config.norm_eps, builder.context.backend.operators))
        return norms[0], norms[1]
