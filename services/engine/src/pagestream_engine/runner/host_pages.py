"""KV pages in host memory, and copies between them and the device's blocks."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from statistics import median
from time import perf_counter
from typing import Self

import torch
from torch import Tensor

from pagestream_engine.attention.base import KVStore, host_tensor
from pagestream_engine.config import CacheConfig
from pagestream_engine.errors import ConfigError
from pagestream_engine.transfers import slab_pages

_TRIALS = 5
_TRIAL_PAGES = 8


class HostPages:
    """The executor's side of `kv_cache.host_tier`.

    On a GPU the pages are pinned, and copies run on a stream of their own: after all steps that were launched before,
    beside the step that they come with, and before the next one, which waits for them on the device. The host waits
    for none. On a CPU they are done at once.
    """

    def __init__(self, store: KVStore, slabs: Sequence[int]) -> None:
        """Allocate the pages. On a CPU they take memory when they are first written.

        Args:
            store: of the device's blocks, allocated.
            slabs: pages of each allocation, as `slab_pages` says; at least one.
        """
        self._store = store
        self._ends = list(accumulate(slabs))
        self._stream: torch.cuda.Stream | None = None
        if store.device.type == "cuda":
            self._stream = torch.cuda.Stream(store.device)  # type: ignore[no-untyped-call]
        self._num_pages = list(slabs)
        self._slabs: list[list[Tensor]] = []
        """Of each allocation the parts of its pages, (pages, 2, layer slots, ...)."""
        self.allocate()

    @classmethod
    def of(cls, store: KVStore, options: CacheConfig, free: int, num_ranks: int) -> Self:
        """Allocate a rank's part of what the options say.

        Args:
            store: of the device's blocks, allocated.
            options: of the cache.
            free: bytes of memory that it may take.
            num_ranks: that share the machine.

        Raises:
            ConfigError: they do not hold one block, or there is less memory.
        """
        num_bytes = int(options.swap_space * 2**30) // num_ranks
        page_bytes, is_cuda = store.block_bytes, store.device.type == "cuda"
        if not is_cuda:  # whose memory counts as free until blocks are first written
            free -= sum(part.nbytes for part in store.parts)
        slabs = slab_pages(num_bytes, page_bytes, pinned=is_cuda)
        if not slabs or num_bytes > free:
            expected = f"GiB of at least one block of {page_bytes} bytes, and at most the {free / 2**30:.1f} free ones"
            raise ConfigError("swap_space", num_bytes / 2**30, expected)
        return cls(store, slabs)

    def __len__(self) -> int:
        return self._ends[-1]

    def allocate(self) -> None:
        """Allocate the pages, again after `release`; what they hold is undefined."""
        self._slabs = [self._allocate(count) for count in self._num_pages]

    def release(self) -> None:
        """Free the pages, once all copies are done, until `allocate`."""
        self._synchronize()
        self._slabs = []

    def launch(self, saves: Sequence[Sequence[int]], loads: Sequence[Sequence[int]]) -> None:
        """Begin a step's copies, and let what is launched from now on wait for those of the steps before.

        Args:
            saves: block and page of each; no page twice, none that is loaded.
            loads: block and page of each; no block twice, none that is saved.
        """
        if self._stream is None:
            self._copy(saves, loads)
            return
        current = torch.cuda.current_stream(self._store.device)
        current.wait_stream(self._stream)
        if saves or loads:
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                self._copy(saves, loads)

    def measure_load_s(self) -> float:
        """Return the seconds of copying one page to the device, before any block is used."""
        num_pages = min(_TRIAL_PAGES, len(self), self._store.cache.shape[2])
        copies = [(index, index) for index in range(num_pages)]
        seconds = []
        self._copy(copies, copies)
        for _ in range(_TRIALS):
            self._synchronize()
            start = perf_counter()
            self._copy((), copies)
            self._synchronize()
            seconds.append((perf_counter() - start) / num_pages)
        return median(seconds)

    def _copy(self, saves: Sequence[Sequence[int]], loads: Sequence[Sequence[int]]) -> None:
        for block, page in saves:
            for of_block, of_page in self._pairs(block, page):
                of_page.copy_(of_block, non_blocking=True)
        for block, page in loads:
            for of_block, of_page in self._pairs(block, page):
                of_block.copy_(of_page, non_blocking=True)

    def _pairs(self, block: int, page: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Each part of a block, (2, layer slots, ...), and its place in host memory."""
        slab = bisect_right(self._ends, page)
        place = page - self._ends[slab]  # from the slab's end
        for of_blocks, of_pages in zip(self._store.parts, self._slabs[slab], strict=True):
            yield of_blocks[:, :, block], of_pages[place]

    def _allocate(self, num_pages: int) -> list[Tensor]:
        """All parts of so many pages, in one allocation."""
        pages = [part[:, :, 0] for part in self._store.parts]
        num_bytes = num_pages * sum(page.nbytes for page in pages)
        if self._stream is not None:
            memory = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        else:
            memory = host_tensor((num_bytes,), torch.uint8)
        # Wider elements first, so that each part begins at a multiple of its elements.
        order = sorted(range(len(pages)), key=lambda index: -pages[index].element_size())
        parts = dict(zip(order, torch.split(memory, [num_pages * pages[index].nbytes for index in order]), strict=True))
        return [parts[index].view(page.dtype).view(num_pages, *page.shape) for index, page in enumerate(pages)]

    def _synchronize(self) -> None:
        if self._stream is not None:
            torch.cuda.synchronize(self._store.device)
