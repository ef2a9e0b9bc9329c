"""What a KV cache keeps of each token, by KV group: layers whose caches have one shape, with a block table of their own
over one pool of equal pages; and what the places of such a table say.

It is of the engine's ground, as `plan` is.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass, replace
from typing import NamedTuple

from pagestream_engine.errors import UnsupportedModel

NO_BLOCK = -1
"""In a block table: a place whose tokens attention no longer reads, and which holds no block."""
TO_LOAD = -2
"""In the table of a cached prefix: a place whose block is in host memory, and gets a block of the pool."""
MAX_PADDING = 0.05
"""Share of a long sequence's memory that padding may take to have fewer groups: each is a table to keep."""


@dataclass(frozen=True, slots=True)
class KVSpec:
    """What one layer keeps of each token: a key and a value of `num_kv_heads` heads."""

    num_kv_heads: int
    head_dim: int
    window: int | None = None
    """Tokens that a query attends to, its own included; None is all that came before."""

    @property
    def elements_per_token(self) -> int:
        """Of a key, and as many of a value."""
        return self.num_kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers of one shape that share block tables: block b of the group holds the same tokens in each of its layers.

    What a kind of attention keeps of a sequence is one number, `first_block`: 0 for full attention, the block in which
    the window begins for a sliding one.
    """

    layers: tuple[int, ...]
    """Indices in the model. The i-th is stored in layer slot i, which it shares with the i-th layer of other groups."""
    spec: KVSpec
    block_size: int
    """Tokens a block."""

    def num_blocks_for(self, num_tokens: int) -> int:
        """Places of a table that covers this many tokens, those behind the window included."""
        return -(-num_tokens // self.block_size)

    def first_block(self, num_computed_tokens: int) -> int:
        """The first place of a table that attention reads from when so many tokens are computed."""
        if self.spec.window is None:
            return 0
        return max(0, num_computed_tokens - self.spec.window + 1) // self.block_size

    def max_blocks_held(self, num_tokens: int, chunk: int) -> int:
        """Most blocks that a sequence of this many tokens holds at once if no step computes more than `chunk` of them:
        `chunk` queries attend to `window + chunk - 1` tokens, which lie anywhere between block borders."""
        if self.spec.window is None:
            return self.num_blocks_for(num_tokens)
        span = self.spec.window + max(1, chunk) - 1
        return min(self.num_blocks_for(num_tokens), self.num_blocks_for(span - 1) + 1)


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The groups of a model, whose blocks have equal pages: `block_size * spec.elements_per_token` is the same in all.

    Each layer slot has storage for one page a block. A block id belongs to one group at a time, and is a page of that
    id in every slot, which the slot's layer of that group views in its own shape.
    """

    groups: tuple[KVGroup, ...]
    num_slots: int
    """Layers of the largest group."""
    separates_outputs: bool = False
    """Whether a sequence's outputs have other bits in their keys and values than the same tokens in a prompt, so that
    blocks of the one kind must not be found in the place of the other."""

    @property
    def block_size(self) -> int:
        """Tokens of the smallest block. Those of other groups are this times a power of two."""
        return min(group.block_size for group in self.groups)

    @property
    def finest_group(self) -> int:
        """Index of the first group with the smallest blocks: where no block of its ends, none of another's does."""
        return [group.block_size for group in self.groups].index(self.block_size)

    @property
    def padding(self) -> float:
        """Share of all groups' layer slots that have no layer."""
        return 1.0 - sum(len(group.layers) for group in self.groups) / (len(self.groups) * self.num_slots)

    def num_blocks_for(self, num_tokens: int, chunk: int = 1) -> int:
        """Most blocks that a sequence of this many tokens holds at once, in all groups: see `KVGroup`."""
        return sum(group.max_blocks_held(num_tokens, chunk) for group in self.groups)

    def max_tokens(self, num_blocks: int, limit: int) -> int:
        """Tokens of the longest sequence that a pool of `num_blocks` can hold alone, at most `limit`."""
        fits, too_long = 0, limit + 1
        while too_long - fits > 1:
            middle = (fits + too_long) // 2
            if self.num_blocks_for(middle) <= num_blocks:
                fits = middle
            else:
                too_long = middle
        return fits


def make_layout(
    specs: abc.Sequence[KVSpec], block_size: int, max_model_len: int, stages: abc.Sequence[range] = ()
) -> KVLayout:
    """Divide a model's layers into groups.

    Layers of one shape are divided into as many groups as it takes so that no group has more than `num_slots` layers.
    `num_slots` is the largest number that costs a sequence of `max_model_len` tokens at most MAX_PADDING more memory
    than groups of one layer would. Where a token of one shape takes half or a quarter of one of another, its blocks
    hold two or four times as many tokens.

    Args:
        specs: what each layer keeps.
        block_size: tokens of a block of the layers that keep most.
        max_model_len: tokens of the longest sequence. A window that is not shorter is full attention.
        stages: layers that different devices have, which each keep the pages of their own: every group gets about as
            many layers of each.

    Raises:
        UnsupportedModel: the sizes of two shapes are not in a ratio of a power of two.
    """
    kinds: dict[KVSpec, list[int]] = {}
    for layer, spec in enumerate(specs):
        kinds.setdefault(_without_wide_window(spec, max_model_len), []).append(layer)
    largest = max(kinds, key=lambda spec: spec.elements_per_token)
    whole = [
        KVGroup(_dealt(layers, stages), spec, block_size * _tokens_for_one(largest, spec))
        for spec, layers in kinds.items()
    ]
    num_slots = _choose_num_slots(whole, max_model_len)
    groups = [part for group in whole for part in _split(group, num_slots)]
    return KVLayout(tuple(groups), max(len(group.layers) for group in groups))


def _dealt(layers: list[int], stages: abc.Sequence[range]) -> tuple[int, ...]:
    """Order layers so that those of each stage are spread evenly."""
    places = {layer: (place + 0.5) / len(own) for own in _own_layers(layers, stages) for place, layer in enumerate(own)}
    return tuple(sorted(layers, key=lambda layer: (places[layer], layer))) if stages else tuple(layers)


def _own_layers(layers: list[int], stages: abc.Sequence[range]) -> list[list[int]]:
    return [[layer for layer in layers if layer in stage] for stage in stages]


def full_attention(block_size: int, num_layers: int = 1, spec: KVSpec | None = None) -> KVLayout:
    """The layout of a model all of whose layers are alike, and attend to everything."""
    spec = KVSpec(1, 1) if spec is None else spec
    group = KVGroup(tuple(range(num_layers)), spec, block_size)
    return KVLayout((group,), num_layers)


def _without_wide_window(spec: KVSpec, max_model_len: int) -> KVSpec:
    is_wide = spec.window is not None and spec.window >= max_model_len
    return replace(spec, window=None) if is_wide else spec


def _tokens_for_one(largest: KVSpec, spec: KVSpec) -> int:
    """How many tokens of one shape take what one of the largest takes."""
    ratio, rest = divmod(largest.elements_per_token, spec.elements_per_token)
    if rest or ratio & (ratio - 1):
        raise UnsupportedModel(
            f"layers: given caches of {largest.num_kv_heads} heads of {largest.head_dim} and of {spec.num_kv_heads} of "
            f"{spec.head_dim}, expected a ratio of 1, 2, 4, ... between their sizes"
        )
    return ratio


def _choose_num_slots(whole: list[KVGroup], max_model_len: int) -> int:
    blocks = {group: group.max_blocks_held(max_model_len, 1) for group in whole}
    most = max(len(group.layers) for group in whole)
    unpadded = sum(len(group.layers) * held for group, held in blocks.items())

    def cost(num_slots: int) -> int:
        return sum(num_slots * -(-len(group.layers) // num_slots) * held for group, held in blocks.items())

    return max(slots for slots in range(1, most + 1) if cost(slots) <= (1 + MAX_PADDING) * unpadded)


def _split(group: KVGroup, num_slots: int) -> list[KVGroup]:
    """Parts of at most `num_slots` layers each."""
    layers = group.layers
    return [replace(group, layers=layers[start : start + num_slots]) for start in range(0, len(layers), num_slots)]


class HostMemory(NamedTuple):
    """Pages in host memory, each for one block."""

    num_pages: int
    page_bytes: int
    load_page_s: float
    """Seconds to copy one to a block."""
