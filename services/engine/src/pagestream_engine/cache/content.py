"""Names for the content of blocks: a chain of SHA-256 over a sequence's tokens."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import sha256

from pagestream_engine.request.sequence import TokenSequence

_ROOT = b"pagestream/prefix/1"


class BlockHasher:
    """Names for the content of full blocks of one size: a chain of SHA-256, so that a name stands for the whole prefix.

    The names are the same on every machine.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._pack = struct.Struct(f"<{block_size}I").pack

    def root(self, extra_key: bytes = b"") -> bytes:
        """The parent of a first block. Sequences with another extra key (adapter, tenant salt) share nothing."""
        return sha256(_ROOT + extra_key, usedforsecurity=False).digest()

    def child(self, parent: bytes, token_ids: Sequence[int]) -> bytes:
        """The name of a full block that follows `parent`."""
        return sha256(parent + self._pack(*token_ids), usedforsecurity=False).digest()

    def name(self, seq: TokenSequence, num_tokens: int) -> bytes:
        """The name of a sequence's first `num_tokens` tokens, a multiple of the block size.

        It names the block that ends there, whatever its size. Each link of the chain is computed once a sequence, as
        `token_ids` never change.
        """
        hashes, size = seq.block_hashes, self.block_size
        while len(hashes) * size < num_tokens:
            parent = hashes[-1] if hashes else self.root(seq.cache_salt)
            start = len(hashes) * size
            hashes.append(self.child(parent, seq.token_ids[start : start + size]))
        return hashes[num_tokens // size - 1]
