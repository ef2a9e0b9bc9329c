"""Memory of packed weights: pieces of chunks in large pages, since a step reads all of them from end to end."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from pagestream_engine.attention.kv_store import host_tensor

_CHUNK_WORDS = 16 << 20
"""64 MiB: most matrices are smaller than a page of 2 MiB, or end within one."""
_LINE_WORDS = 16
"""Of a cache: where pieces begin."""


class PanelMemory:
    """Cuts pieces from the chunk begun last. A chunk is freed with the last of its pieces."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._left = torch.empty(0, dtype=torch.int32)

    def take(self, num_words: int) -> Tensor:
        """Return (num_words,) int32 of undefined content."""
        size = -(-num_words // _LINE_WORDS) * _LINE_WORDS
        with self._lock:
            if size > len(self._left):
                self._left = host_tensor((max(size, _CHUNK_WORDS),), torch.int32)
            piece, self._left = self._left[:num_words], self._left[size:]
        return piece
