"""Least valuable first, where a block's value fades as others are evicted (GreedyDual: Young, 1994)."""

from __future__ import annotations

from abc import abstractmethod

from pagestream_engine.cache.eviction.base import NO_PARENT
from pagestream_engine.cache.eviction.heap_order import HeapOrder

ATTENTION_TOKENS = 24_576
"""Tokens of context at which attention costs a prompt's token as much as all else: 6 times the hidden size, 4,096 of a
model of 8 billion parameters. Attention takes 4 operations a token of context and unit of hidden size, all else about
24 a unit of hidden size, squared."""

MAX_HITS = 8
"""Hits of a block that count: a prefix that was found thousands of times goes as soon after its last hit as one that
was found so often."""


class _Ageing(HeapOrder):
    """A block's value is its `worth` above the value of the last block that was evicted, and never below that of one
    which continues its prefix and is in the order."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._floor = 0.0
        """Value of the last block that was evicted."""
        self._least = [0.0] * num_blocks
        """Of each block, the highest value of those that continue it."""
        self._parents = [NO_PARENT] * num_blocks
        self._num_tokens = [0] * num_blocks
        self._num_hits = [0] * num_blocks

    @abstractmethod
    def worth(self, num_hits: int, num_tokens: int) -> float:
        """Return what a block is worth by how often it was found, and by the tokens of its prefix."""

    def value(self, block: int) -> float:
        worth = self.worth(self._num_hits[block], self._num_tokens[block])
        value = max(self._floor + worth, self._least[block])
        parent = self._parents[block]
        if parent != NO_PARENT:
            self._least[parent] = max(self._least[parent], value)
        return value

    def note_evicted(self, value: float) -> None:
        self._floor = value

    def note_cached(self, block: int, num_tokens: int, parent: int) -> None:
        self._parents[block] = parent
        self._num_tokens[block] = num_tokens
        self._num_hits[block] = 0
        self._least[block] = 0.0

    def note_hit(self, block: int) -> None:
        self._num_hits[block] = min(self._num_hits[block] + 1, MAX_HITS)


class LeastFrequentlyUsed(_Ageing):
    """By how often a block was found, with ageing (LFU-DA: Arlitt et al., 2000)."""

    def worth(self, num_hits: int, num_tokens: int) -> float:
        return 1.0 + num_hits


class LeastCost(_Ageing):
    """By how often a block was found, times what it costs to compute again (GDSF: Cherkasova, 1998): the later a block
    is in its prefix, the more its tokens attend to."""

    def worth(self, num_hits: int, num_tokens: int) -> float:
        return (1.0 + num_hits) * (1.0 + num_tokens / ATTENTION_TOKENS)
