"""What the block pool asks of an order of eviction."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

NO_PARENT = -1
"""In place of the block before it: the block begins a prefix."""


class EvictionOrder(ABC):
    """The free blocks in the order in which they are used anew; at first all blocks of a pool, which hold nothing.

    Empty blocks go before cached ones. No cached block goes before one that continues its prefix, which would be
    worthless without it: a sequence's blocks are added from its end to its beginning.
    """

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __contains__(self, block: int) -> bool: ...

    @abstractmethod
    def __iter__(self) -> Iterator[int]:
        """The blocks, the one that is used first first."""

    def next_blocks(self) -> Iterator[int]:
        """About the same, at a cost of O(1) for each: which blocks are used anew before long."""
        return iter(self)

    @abstractmethod
    def pop_front(self) -> int:
        """Take the first block.

        Raises:
            IndexError: there is none.
        """

    @abstractmethod
    def remove(self, block: int) -> None:
        """Take a block that is in the order, for what it holds."""

    @abstractmethod
    def add_empty(self, block: int) -> None:
        """Add a block that can't be found by its hash."""

    @abstractmethod
    def add_cached(self, block: int) -> None:
        """Add a block that can be found by its hash: `note_cached` has named it."""

    def note_cached(self, block: int, num_tokens: int, parent: int) -> None:  # noqa: B027 - not every order cares
        """Note that a block can be found from now on. By default nothing.

        Args:
            block: not in the order.
            num_tokens: of its sequence up to the block's end.
            parent: the cached block of the same KV group before it, or NO_PARENT.
        """

    def note_hit(self, block: int) -> None:  # noqa: B027
        """Note that a sequence has found a block. By default nothing.

        Args:
            block: not in the order, or no longer.
        """
