"""The layer object takes heads of other sizes and layouts than the cache's."""

from __future__ import annotations

import math

import pytest
import torch
from pagestream_engine.attention import AttentionBatch, AttentionSpec, CacheShape, Rotation
from pagestream_engine.layers.attention import PagedAttention
from pagestream_engine.native_build import find_compiler
from support.engines.attention_cases import make_backend, rotated

NAMES = ("torch", "deterministic torch", "native") if find_compiler() else ("torch", "deterministic torch")
TOKENS, HEADS, KV_HEADS = 21, 4, 2


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("turns", [False, True], ids=["unrotated", "rotated"])
@pytest.mark.parametrize(("head_dim", "value_dim"), [(24, 24), (32, 8), (24, 32), (32, 32)])
def test_heads_of_other_sizes_and_layouts(name: str, turns: bool, head_dim: int, value_dim: int) -> None:
    shape = CacheShape((3,), KV_HEADS, 32, 8, torch.float32)
    backend = make_backend(name, [shape], torch.device("cpu"))
    backend.store.allocate(4)
    backend.store.cache.fill_(math.nan)
    # Heads lie before tokens, as transformers' modelling code has them.
    query, key = (torch.randn(heads, TOKENS, head_dim).transpose(0, 1) for heads in (HEADS, KV_HEADS))
    value = torch.randn(KV_HEADS, TOKENS, value_dim).transpose(0, 1)
    angles = torch.outer(torch.arange(float(TOKENS)), 100.0 ** -(torch.arange(0, head_dim, 2) / head_dim))
    rotation = Rotation(torch.cat((angles.cos(), angles.sin()), dim=1))
    turned = [rotated(x.double(), rotation) if turns else x.double() for x in (query, key)]
    q, k, v = (x.transpose(0, 1) for x in (*turned, value.double()))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.2, enable_gqa=True)

    positions = torch.arange(TOKENS)
    blocks = torch.tensor([[2, 0, 3]], dtype=torch.int32)
    slots = blocks[0, positions // 8].long() * 8 + positions % 8
    batch = AttentionBatch(positions, slots, blocks, torch.tensor([0]), [TOKENS], [TOKENS], 1)
    context = backend.prepare_step([batch])
    layer = PagedAttention(backend, 3, AttentionSpec(HEADS, KV_HEADS, 32, scale=0.2))
    made = layer(query, key, value, context, backend.operators.angles(rotation, positions) if turns else None)
    assert made.shape == (TOKENS, HEADS * value_dim)
    torch.testing.assert_close(made.double(), expected.transpose(0, 1).flatten(1), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("sinks", [torch.zeros(2), torch.zeros(4, dtype=torch.float16), torch.zeros(8)[::2]])
def test_sinks_of_another_kind_are_refused(sinks: torch.Tensor) -> None:
    backend = make_backend("torch", [CacheShape((0,), 2, 16, 8, torch.float32)], torch.device("cpu"))
    with pytest.raises(ValueError, match=r"sinks: given .*, expected contiguous torch.float32 of shape \(4,\)"):
        PagedAttention(backend, 0, AttentionSpec(4, 2, 16, 0.25, sinks=sinks))
