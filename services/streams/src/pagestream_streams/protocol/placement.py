"""Place prompts on partitions, and partitions on engines."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Collection, Sequence
from functools import lru_cache


def choices(
    prompt_token_ids: Sequence[int], partitions: int, first_tokens: int, cache_salt: bytes = b""
) -> tuple[int, int]:
    """Return a prompt's first and second choice of a partition, equal for prompts with equal `first_tokens` tokens.

    The two differ unless there is only one partition. Prompts with another salt, which share nothing, choose anew.
    """
    head = array("Q", prompt_token_ids[:first_tokens]).tobytes()
    digest = hashlib.blake2b(head + cache_salt, digest_size=16).digest()
    first = int.from_bytes(digest[:8], "big") % partitions
    if partitions == 1:
        return first, first
    step = 1 + int.from_bytes(digest[8:], "big") % (partitions - 1)
    return first, (first + step) % partitions


def owner(partition: int, engines: Collection[str]) -> str | None:
    """Return the engine with the highest hash of (engine, partition); None without engines.

    This is rendezvous hashing: adding an engine moves 1/n of the partitions.
    """
    return max(engines, key=lambda engine: _weight(engine, partition), default=None)


def owned(engine: str, partitions: int, engines: Collection[str]) -> list[int]:
    """Return the partitions that an engine owns among the living `engines`; it counts as living itself."""
    return list(_owned(engine, partitions, frozenset({*engines, engine})))


@lru_cache(maxsize=16)  # a heartbeat asks at each beat: 10 engines and 1,024 partitions take 15 ms
def _owned(engine: str, partitions: int, living: frozenset[str]) -> tuple[int, ...]:
    return tuple(number for number in range(partitions) if owner(number, living) == engine)


def _weight(engine: str, partition: int) -> bytes:
    return hashlib.blake2b(f"{partition}:{engine}".encode(), digest_size=8).digest()
