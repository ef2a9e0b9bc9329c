"""Layers that model families share: linears, experts, rotary embedding."""

from pagestream_engine.layers.linear import Linear
from pagestream_engine.layers.rope import ROPE_KINDS, Rope, RopeContext, cos_sin_table, rope_frequencies

__all__ = [
    "ROPE_KINDS",
    "Linear",
    "Rope",
    "RopeContext",
    "cos_sin_table",
    "rope_frequencies",
]
