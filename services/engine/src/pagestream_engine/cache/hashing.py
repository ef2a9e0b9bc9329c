"""Names for the content of full blocks: a chain of sha256, so that a name stands for the whole prefix."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import sha256

_ROOT = b"pagestream/prefix/1"


class BlockHasher:
    """Hashes blocks of one size. The names are the same on every machine."""

    def __init__(self, block_size: int) -> None:
        self._pack = struct.Struct(f"<{block_size}I").pack

    def root(self, extra_key: bytes = b"") -> bytes:
        """The parent of a first block. Sequences with another extra key (adapter, tenant salt) share nothing."""
        return sha256(_ROOT + extra_key, usedforsecurity=False).digest()

    def child(self, parent: bytes, token_ids: Sequence[int]) -> bytes:
        """The name of a full block that follows `parent`."""
        return sha256(parent + self._pack(*token_ids), usedforsecurity=False).digest()
