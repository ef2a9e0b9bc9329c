"""The tier below the pool: pages of host memory that hold blocks which were evicted, or soon will be; and whether it
pays to copy them back (`RestoreCost`)."""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import NamedTuple

from pagestream_engine.config import SchedulerConfig
from pagestream_engine.kv_cache.block_pool import BlockPool, Segmented
from pagestream_engine.plan import HostMemory, KVLayout, PageCopy, ScheduledStep
from pagestream_engine.request import Sequence


class Load(NamedTuple):
    """A block that a sequence gets back from a page."""

    seq: Sequence
    copy: PageCopy
    block_hash: bytes
    num_tokens: int
    """Of the prefix, the block's own included."""
    parent_hash: bytes | None
    """Of the block before it in its KV group."""


class Save(NamedTuple):
    """A cached block that gets a page."""

    copy: PageCopy
    block_hash: bytes


class HostTier:
    """Which page holds which block, and the copies of the next step.

    A step's copies run beside its computation, after those of the steps before it, and are done before the next step
    computes. So a step neither reads a block that it loads nor writes one that it saves:

    * a sequence with blocks to load computes from the step after on (`is_loading`), and only then are the blocks found
      by others;
    * free blocks are saved ahead of their eviction, in the step before they can be taken. One that is evicted earlier
      is lost to the tier: no step waits for a save.

    `note_sent` and `note_collected` follow the steps in flight. `roll_back` forgets what their copies were to leave,
    in pages and blocks, since nothing says whether they were made.
    """

    def __init__(self, pool: BlockPool, num_pages: int, num_ahead: int, load_page_s: float = 0.0) -> None:
        """Make an empty tier.

        Args:
            num_ahead: how many of the blocks that are evicted next are saved; what a step takes at most is enough.
            load_page_s: seconds to copy a page to the device.
        """
        self.load_page_s = load_page_s
        self._pool = pool
        self._pages = BlockPool(num_pages, Segmented(num_pages))
        self._num_ahead = num_ahead
        self._loads: list[Load] = []
        self._loading: set[Sequence] = set()
        self._saves: list[Save] = []
        self._in_flight: deque[tuple[list[Save], list[Load]]] = deque()
        self.saves_blocks = True
        """Whether steps save blocks; those that are saved stay."""
        self.num_saved = 0
        """Blocks that were sent to pages."""
        self.num_loaded = 0
        """Blocks that were sent back."""

    @property
    def num_pages(self) -> int:
        """All that there are."""
        return self._pages.num_blocks

    @property
    def num_used_pages(self) -> int:
        """Pages whose content can be found."""
        return len(self._pages.by_hash)

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._pages.by_hash

    # -- loads --

    @property
    def loads(self) -> list[PageCopy]:
        """What the next step loads."""
        return [load.copy for load in self._loads]

    def is_loading(self, seq: Sequence) -> bool:
        """Whether the next step loads blocks of a sequence, which it must not compute then."""
        return seq in self._loading

    def load(self, seq: Sequence, block: int, block_hash: bytes, num_tokens: int, parent_hash: bytes | None) -> None:
        """Load a block that some page holds.

        Args:
            block: its page is free to be written.
            block_hash: of what it gets.
            num_tokens: as `BlockPool.cache_full_block`.
        """
        page = self._pages.by_hash[block_hash]
        self._pages.reuse(page)
        self._loads.append(Load(seq, PageCopy(block, page), block_hash, num_tokens, parent_hash))
        self._loading.add(seq)

    def forget(self, seq: Sequence) -> None:
        """Drop the loads of a sequence that is about to release its blocks."""
        if seq in self._loading:
            self._loading.remove(seq)
            for load in reversed(self._loads):
                if load.seq is seq:
                    self._pages.release(load.copy.page)
            self._loads = [load for load in self._loads if load.seq is not seq]

    # -- saves --

    def choose_saves(self) -> list[PageCopy]:
        """Choose what the step that is about to be sent saves: blocks that are evicted next, and that no page holds."""
        self._drop_unsent_saves()
        if not self.saves_blocks:
            return []
        pages, hashes = self._pages, self._pool.hashes
        for block in islice(self._pool.free_blocks.next_blocks(), self._num_ahead):
            block_hash = hashes[block]
            if block_hash is None or block_hash in pages.by_hash:
                continue
            if not pages.num_free:
                break
            self._saves.append(Save(PageCopy(block, pages.allocate()), block_hash))
        return [save.copy for save in self._saves]

    def _drop_unsent_saves(self) -> None:
        """Release the pages that a step was to get which was never sent."""
        for save in self._saves:
            self._pages.release(save.copy.page)
        self._saves = []

    # -- steps in flight --

    def note_sent(self) -> None:
        """Note that a step with `loads` and the chosen saves was sent: what later steps find is there for them."""
        for save in self._saves:
            self._pages.cache_full_block(save.copy.page, save.block_hash)
            self._pages.release(save.copy.page)
        for load in self._loads:
            self._pool.cache_full_block(load.copy.block, load.block_hash, load.num_tokens, load.parent_hash)
        for load in reversed(self._loads):  # The end of a prefix is lost before its beginning.
            self._pages.release(load.copy.page)
        self.num_saved += len(self._saves)
        self.num_loaded += len(self._loads)
        self._in_flight.append((self._saves, self._loads))
        self._saves, self._loads = [], []
        self._loading.clear()

    def note_collected(self) -> None:
        """Note that the oldest step in flight was collected: its copies were made."""
        self._in_flight.popleft()

    def roll_back(self) -> None:
        """Forget the copies of the steps in flight. The sequences that they were for release their blocks next."""
        self._drop_unsent_saves()
        for saves, loads in self._in_flight:
            for save in saves:
                self._pages.forget(save.copy.page, save.block_hash)
            for load in loads:
                self._pool.forget(load.copy.block, load.block_hash)
        self._in_flight.clear()

    def reset(self) -> None:
        """Forget all pages, where the memory behind them is gone; no step is in flight, and no sequence has blocks."""
        self._pages.reset_prefix_cache()

    def check(self) -> str | None:
        """Return a contradiction between two steps, if there is one."""
        held = {load.copy.page for load in self._loads} | {save.copy.page for save in self._saves}
        for page, count in enumerate(self._pages.ref_counts):
            if (count > 0) != (page in held):
                return f"host page {page} is referenced {count} times, and copied to or from in {page in held}"
        if self._loading != {load.seq for load in self._loads}:
            return "a sequence loads without a copy, or the reverse"
        targets = [load.copy.block for load in self._loads]
        if len(set(targets)) < len(targets) or not all(self._pool.ref_counts[block] for block in targets):
            return "a block is loaded twice, or is free"
        return None


def make_tier(pool: BlockPool, host: HostMemory | None, layout: KVLayout, limits: SchedulerConfig) -> HostTier | None:
    """Make the tier below a pool; None without host pages."""
    if host is None:
        return None
    most_taken = -(-(limits.max_num_batched_tokens + limits.max_num_seqs) // layout.block_size)
    # Not all of few pages: each step would save over what the last one has saved.
    num_ahead = min(most_taken * len(layout.groups), host.num_pages // 2)
    return HostTier(pool, host.num_pages, num_ahead, host.load_page_s)


RESTORE_MEMORY = 0.95
"""Weight of a step relative to the one after it."""
PROMPT_SHARE = 0.8
"""Of a step's tokens that prompts have at least, in steps that tell what a prompt's token takes."""


class RestoreCost:
    """Says whether evicted blocks are copied back from host memory or computed again.

    It compares seconds that were measured on this machine: of copies when the executor has loaded, of prompts' tokens
    in the steps since.

    A mean over whole steps is taken, and no model of what they depend on: a fit to noisy steps may call tokens free.

    Args:
        load_page_s: seconds to copy one page to the device.
    """

    def __init__(self, load_page_s: float) -> None:
        self._load_page_s = load_page_s
        self._seconds = 0.0
        self._num_tokens = 0.0

    def note(self, step: ScheduledStep, seconds: float) -> None:
        """Learn from a step that has run."""
        num_prompt_tokens = sum(chunk.num_scheduled_tokens for chunk in step.prefills)
        if num_prompt_tokens and num_prompt_tokens >= PROMPT_SHARE * step.num_tokens:
            self._seconds = RESTORE_MEMORY * self._seconds + seconds
            self._num_tokens = RESTORE_MEMORY * self._num_tokens + num_prompt_tokens

    def pays(self, num_pages: int, num_tokens: int) -> bool:
        """Whether to copy so many pages takes less than to compute the tokens that they hold; yes, as long as no prompt
        was computed."""
        if not self._num_tokens:
            return True
        return num_pages * self._load_page_s < num_tokens * self._seconds / self._num_tokens
