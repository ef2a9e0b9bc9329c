"""Hashes of full blocks: a chain of SHA-256 over a sequence's tokens."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import sha256

from pagestream_engine.request import TokenSequence

_ROOT = b"pagestream/prefix/1"


class BlockHasher:
    """Hashes full blocks of one size, each with the hash of the block before it: equal hashes are equal prefixes.

    They are the same on every machine.
    """

    def __init__(self, block_size: int, *, separates_outputs: bool = False) -> None:
        """`separates_outputs` is the layout's: a block with outputs, and all after it, then have other hashes than the
        same tokens in a prompt, and than after a prompt of another length."""
        self.block_size = block_size
        self._separates_outputs = separates_outputs
        self._pack = struct.Struct(f"<{block_size}I").pack

    def root(self, extra_key: bytes = b"") -> bytes:
        """Return the parent of a first block. Sequences with another extra key (adapter, tenant salt) share nothing."""
        return sha256(_ROOT + extra_key, usedforsecurity=False).digest()

    def hash_block_tokens(self, parent: bytes, token_ids: Sequence[int]) -> bytes:
        """Return the hash of a full block that follows the one with the hash `parent`."""
        return sha256(parent + self._pack(*token_ids), usedforsecurity=False).digest()

    def block_hash(self, seq: TokenSequence, num_tokens: int) -> bytes:
        """Return the hash of the block that ends with a sequence's first `num_tokens`, a multiple of the block size.

        Larger blocks that end there have it too. Each link of the chain is computed once and kept in
        `seq.block_hashes`: tokens are appended to a sequence, and never changed.
        """
        hashes, size = seq.block_hashes, self.block_size
        while len(hashes) * size < num_tokens:
            hashes.append(self.hash_next_block(seq, len(hashes) * size, hashes[-1] if hashes else None))
        return hashes[num_tokens // size - 1]

    def hash_next_block(self, seq: TokenSequence, start: int, parent: bytes | None) -> bytes:
        """Return the hash of a sequence's full block that begins with token `start`, after the one with the hash
        `parent`; None: the first."""
        parent = self.root(seq.cache_salt) if parent is None else parent
        if self._separates_outputs and start <= seq.num_prompt_tokens < start + self.block_size:
            parent += seq.num_prompt_tokens.to_bytes(8, "little")
        return self.hash_block_tokens(parent, seq.token_ids[start : start + self.block_size])
