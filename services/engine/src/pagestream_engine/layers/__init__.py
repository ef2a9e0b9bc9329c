"""Layers that model families share: linears, norms, rotary embedding."""

from pagestream_engine.layers.attention import PagedAttention
from pagestream_engine.layers.linear import Linear
from pagestream_engine.layers.mlp import GatedMlp
from pagestream_engine.layers.rope import ROPE_KINDS, Rope, RopeContext, cos_sin_table, rope_frequencies

__all__ = [
    "ROPE_KINDS",
    "GatedMlp",
    "Linear",
    "PagedAttention",
    "Rope",
    "RopeContext",
    "cos_sin_table",
    "rope_frequencies",
]
