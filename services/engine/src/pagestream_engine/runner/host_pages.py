"""KV pages in host memory, and copies between them and the device's blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median
from time import perf_counter

import torch
from torch import Tensor

from pagestream_engine.attention.kv_store import KVStore, host_tensor

_TRIALS = 5
_TRIAL_PAGES = 8


class HostPages:
    """The executor's side of `cache.host_tier`.

    On a GPU the pages are pinned, and copies run on a stream of their own: after all steps that were launched before,
    beside the step that they come with, and before the next one, which waits for them on the device. The host waits
    for none. On a CPU they are done at once.
    """

    def __init__(self, store: KVStore, num_pages: int) -> None:
        """Allocate the pages. On a CPU they take memory when they are first written.

        Args:
            store: of the device's blocks, allocated.
            num_pages: at least 1.
        """
        self._store = store
        self._num_pages = num_pages
        self._stream: torch.cuda.Stream | None = None
        sizes = [(num_pages, *part[:, :, 0].shape) for part in store.parts]
        if store.device.type == "cuda":
            pairs = zip(sizes, store.parts, strict=True)
            self._parts = [torch.empty(size, dtype=part.dtype, pin_memory=True) for size, part in pairs]
            self._stream = torch.cuda.Stream(store.device)  # type: ignore[no-untyped-call]
        else:
            self._parts = [host_tensor(size, part.dtype) for size, part in zip(sizes, store.parts, strict=True)]

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
        num_pages = min(_TRIAL_PAGES, self._num_pages, self._store.cache.shape[2])
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
        for of_blocks, of_pages in zip(self._store.parts, self._parts, strict=True):
            yield of_blocks[:, :, block], of_pages[page]

    def _synchronize(self) -> None:
        if self._stream is not None:
            torch.cuda.synchronize(self._store.device)
