"""Divide partitions between engines."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache


def partitions_of(engine: str, partitions: int, engines: Collection[str]) -> Sequence[int]:
    """Return the partitions that an engine owns among the living `engines`; it counts as living itself."""
    return ownership(partitions, frozenset({*engines, engine}))[engine]


@lru_cache(maxsize=16)  # heartbeats and placements ask again and again: 64 engines and 256 partitions take 30 ms
def ownership(partitions: int, engines: frozenset[str]) -> Mapping[str, Sequence[int]]:
    """Return the partitions of each engine, in order: equally many, or one more.

    The pairs with the highest hashes are taken first (rendezvous hashing), as far as the engine has room, so that all
    processes find the same and an engine that comes or goes moves few partitions of the others.
    """
    if not engines:
        return {}
    pairs = sorted(
        ((_weight(engine, number), engine, number) for engine in engines for number in range(partitions)), reverse=True
    )
    least, more = divmod(partitions, len(engines))
    found: dict[str, list[int]] = {engine: [] for engine in engines}
    taken = set[int]()
    for _, engine, number in pairs:
        if number in taken:
            continue
        if len(found[engine]) > least or (len(found[engine]) == least and not more):
            continue
        more -= len(found[engine]) == least
        found[engine].append(number)
        taken.add(number)
    return {engine: sorted(numbers) for engine, numbers in found.items()}


def _weight(engine: str, partition: int) -> bytes:
    return hashlib.blake2b(f"{partition}:{engine}".encode(), digest_size=8).digest()
