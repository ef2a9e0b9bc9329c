"""Blocks that another engine has computed, as a tier below an engine's pool."""

from __future__ import annotations

from collections.abc import Sequence

from pagestream_engine.kv_cache.block_pool import BlockPool
from pagestream_engine.kv_cache.host_tier import HostTier


class ReceivedBlocks(HostTier):
    """A tier whose pages other engines fill. A prompt that finds its blocks here loads them, and computes the rest."""

    def __init__(self, pool: BlockPool, num_pages: int) -> None:
        super().__init__(pool, num_pages, num_ahead=0)
        self.saves_blocks = False

    def receive(self, block_hashes: Sequence[bytes]) -> None:
        """Keep the blocks of a prompt, in its order; where pages are short, the least recently used are dropped."""
        pages = []
        for block_hash in block_hashes[: self._pages.num_free]:
            if block_hash not in self._pages.by_hash:
                pages.append(self._pages.allocate())
                self._pages.cache_full_block(pages[-1], block_hash)
        for page in reversed(pages):  # The end of a prefix is lost before its beginning.
            self._pages.release(page)
