"""Every rotation has the angles that `transformers` computes for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pagestream_engine import ModelFileError
from pagestream_engine.layers import ROPE_KINDS, Rope, cos_sin_table, rope_frequencies
from pagestream_engine.models.config import ConfigFile
from pagestream_engine.models.decoder import plain_rope

pytestmark = pytest.mark.served
_CPU = torch.device("cpu")
_HALF = 12
_KINDS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 2.5},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 16, "mscale": 0.7},
    "longrope": {
        "short_factor": [1.0 + 0.1 * i for i in range(_HALF)],
        "long_factor": [2.0 + i for i in range(_HALF)],
        "original_max_position_embeddings": 64,
    },
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "proportional": {"factor": 2.0, "partial_rotary_factor": 0.5},
}


def test_every_scaling_of_transformers_is_known() -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    assert set(ROPE_KINDS) == {"default", *ROPE_INIT_FUNCTIONS} == set(_KINDS)


@pytest.mark.parametrize("num_tokens", [64, 300])
@pytest.mark.parametrize("kind", ROPE_KINDS)
def test_angles_are_those_of_transformers(kind: str, num_tokens: int) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=96,
        num_attention_heads=4,
        max_position_embeddings=256,
        rope_parameters={"rope_type": kind, "rope_theta": 5000.0, **_KINDS[kind]},
    )
    rope = plain_rope(ConfigFile(config.to_dict()))
    positions = torch.arange(num_tokens)
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1, dtype=torch.float32), positions[None])
    size = cos.shape[-1] // 2
    expected = torch.cat((cos[0, :, :size], sin[0, :, :size]), dim=-1)
    torch.testing.assert_close(cos_sin_table(rope, num_tokens, _CPU), expected, rtol=0, atol=0)


def test_a_part_of_the_head_rotates() -> None:
    table = cos_sin_table(Rope(32, share=0.25), 5, _CPU)
    assert table.shape == (5, 8)
    assert torch.equal(table, cos_sin_table(Rope(8), 5, _CPU))


def test_a_scaling_without_its_parameters_is_named() -> None:
    with pytest.raises(ModelFileError, match="low_freq_factor"):
        rope_frequencies(Rope(16, kind="llama3", scaling={"factor": 2.0}), 64)
