"""Token ids of parts of prompts that came before, within a bound of bytes."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from threading import Lock

_ENTRY_BYTES = 300
"""Of a key, an array and their places in the dictionary, beside the ids."""


class EncodingCache:
    """Ids by digest, least recently used out first. Any thread may use it."""

    def __init__(self, max_bytes: int) -> None:
        """`max_bytes`: of all entries; 0 keeps nothing."""
        self._max_bytes = max_bytes
        self._entries: OrderedDict[bytes, array[int]] = OrderedDict()
        self._lock = Lock()
        self.num_bytes = 0
        self.num_hits = 0
        self.num_misses = 0

    def key(self, encoder: int, scope: bytes, text: str) -> bytes:
        """Return the key of a text.

        `encoder` is the number of its encoder; `scope` the cache salt of its request: what was encoded with another one
        is not found, since the time of an answer would tell of it (docs/design/prefix-cache.md).
        """
        digest = hashlib.blake2b(text.encode(), digest_size=24, key=scope)
        digest.update(b"%d" % encoder)
        return digest.digest()

    def get(self, key: bytes) -> array[int] | None:
        """Return the ids of a text, or nothing."""
        with self._lock:
            found = self._entries.get(key)
            if found is None:
                self.num_misses += 1
                return None
            self.num_hits += 1
            self._entries.move_to_end(key)
            return found

    def put(self, key: bytes, ids: array[int]) -> None:
        """Keep the ids of a text; nobody may change them."""
        size = _bytes_of(ids)
        with self._lock:
            if key in self._entries or size > self._max_bytes:
                return
            self._entries[key] = ids
            self.num_bytes += size
            while self.num_bytes > self._max_bytes:
                _, oldest = self._entries.popitem(last=False)
                self.num_bytes -= _bytes_of(oldest)


def _bytes_of(ids: array[int]) -> int:
    return len(ids) * ids.itemsize + _ENTRY_BYTES
