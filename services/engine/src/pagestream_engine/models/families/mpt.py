"""MPT: a slope of each head in place of positions (ALiBi), no biases, and where a file asks for it bounds or norms of
query and key."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch

from pagestream_engine.errors import ModelFileError, UnsupportedModel
from pagestream_engine.layers.rope import RopeContext
from pagestream_engine.models.config import ConfigFile
from pagestream_engine.models.decoder import DecoderConfig, HeadsNorm, LayerConfig, LayerNorm, Norm, read_decoder
from pagestream_engine.models.families.llama import DecoderBuilder
from pagestream_engine.models.gpt import Gpt, GptNames, in_llamas_words, with_shape
from pagestream_engine.models.weights import Part, TensorWeight, Weight

_OWN_NAMES = {
    "hidden_size": "d_model",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "max_position_embeddings": "max_seq_len",
    "rms_norm_eps": "layer_norm_epsilon",
}
_EXPECTED = {"alibi": True, "prefix_lm": False, "attn_type": "multihead_attention"}
"""Of `attn_config`: what `transformers` computes whatever is given."""


class Mpt(Gpt):
    """MosaicML 2023, github.com/mosaicml/llm-foundry, whose code says what `alibi_bias_max`, `logit_scale` and `qk_ln`
    mean: `transformers` leaves them out."""

    architecture = "MptForCausalLM"
    names = GptNames(
        embedding="transformer.wte",
        layers="transformer.blocks.",
        attention="attn.",
        norm="transformer.norm_f",
        input_norm="norm_1",
        post_norm="norm_2",
        up="ffn.up_proj",
        down="ffn.down_proj",
    )
    norm_biases = False

    def read(self, file: ConfigFile) -> DecoderConfig:
        file = in_llamas_words(file, _OWN_NAMES, rms_norm_eps=1e-5, hidden_act="gelu", max_position_embeddings=2048)
        given = file.get("attn_config", {})
        if not isinstance(given, Mapping):
            raise ModelFileError(f"config.json: attn_config: given {given!r}, expected a JSON object")
        attention = ConfigFile(given)
        for name, expected in _EXPECTED.items():
            if attention.get(name, expected) != expected:
                raise UnsupportedModel(
                    f"config.json: attn_config.{name}: given {attention.get(name)!r}, expected {expected!r}"
                )
        hidden_size, context = file.whole("hidden_size"), file.whole("max_position_embeddings")
        file = with_shape(file, file.whole("expansion_ratio", 4) * hidden_size)
        logit_scale = file.get("logit_scale")
        if logit_scale == "inv_sqrt_d_model":
            logit_scale = hidden_size**-0.5
        elif logit_scale is not None:
            logit_scale = file.number("logit_scale")
        return read_decoder(
            file,
            file.info(self.architecture, RopeContext(context, context)),
            (LayerConfig(None),) * file.whole("num_hidden_layers"),
            scale=attention.optional_number("softmax_scale"),
            slopes=mpt_slopes(file.whole("num_attention_heads"), attention.number("alibi_bias_max", 8)),
            qkv_bound=attention.optional_number("clip_qkv") or None,
            qk_norm="all heads" if attention.flag("qk_ln", False) else None,
            logit_scale=logit_scale,
            tie_word_embeddings=file.flag("tie_word_embeddings", True),
        )

    def attention_weights(self, config: DecoderConfig, prefix: str) -> dict[str, Weight]:
        weights = super().attention_weights(config, prefix)
        if config.qk_norm:
            for name, source in (("q_norm", "q_ln"), ("k_norm", "k_ln")):
                weights[name] = TensorWeight.of(f"{prefix}{source}.weight", config.hidden_size)
        return weights

    def qkv(self, config: DecoderConfig, prefix: str) -> Iterator[Part]:
        yield Part(prefix + "Wqkv", 3 * config.query_size)

    def layer_norms(self, builder: DecoderBuilder, index: int) -> tuple[HeadsNorm, HeadsNorm]:
        config, operators = builder.config, builder.context.backend.operators
        weights = [builder.parameters.tensor(f"{index}.{name}") for name in ("q_norm", "k_norm")]
        query, key = (LayerNorm(weight, None, config.norm_eps, operators) for weight in weights)
        return _OfAllHeads(query), _OfAllHeads(key)


class _OfAllHeads:
    """A norm of all heads together."""

    def __init__(self, norm: Norm) -> None:
        self._norm = norm

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """(tokens, heads, head_dim) -> the same shape."""
        return self._norm(x.flatten(1)).view(x.shape)


def mpt_slopes(num_heads: int, largest: float) -> tuple[float, ...]:
    """Return the slope of each head: those of the next power of two, every second one first, as many as there are
    heads.

    Args:
        largest: exponent of the last slope.
    """
    whole = 2 ** math.ceil(math.log2(num_heads))
    exponents = torch.arange(1, whole + 1, dtype=torch.int64).float() * (largest / whole)
    slopes: list[float] = (1.0 / torch.pow(2, exponents)).tolist()
    return tuple(slopes if whole == num_heads else (slopes[1::2] + slopes[::2])[:num_heads])
