"""How full Redis is: the memory that counts for its limit, and what log entries take of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from redis import exceptions

from pagestream_streams.connection.connection import Connection
from pagestream_streams.errors import Unavailable


class MemoryUse(NamedTuple):
    """The memory of the fullest server, in bytes."""

    used: int
    """What counts for the limit: without the buffers of replicas and of the append-only file."""
    limit: int
    """maxmemory; 0 for none."""

    @property
    def is_full(self) -> bool:
        """Whether Redis refuses what needs memory."""
        return 0 < self.limit < self.used

    @property
    def share(self) -> float:
        """Used / limit; 0 without a limit."""
        return self.used / self.limit if self.limit else 0.0


async def memory_use(connection: Connection) -> MemoryUse:
    """Return the memory of the server, or of a cluster's fullest master. Unavailable where one does not answer."""
    uses = []
    for fields in await connection.execute_on_each("INFO", "memory"):
        used = int(fields["used_memory"]) - int(fields.get("mem_not_counted_for_evict", 0))
        uses.append(MemoryUse(used, int(fields.get("maxmemory", 0))))
    return max(uses, key=lambda use: (use.share, use.used))


async def entry_size(connection: Connection, logs: Sequence[str]) -> float | None:
    """Return the bytes of memory for each entry of these logs; None where they have none. Unavailable."""
    try:
        replies = await connection.pipeline([command for log in logs for command in _measures(log)])
    except exceptions.ResponseError as error:
        raise Unavailable(f"Redis does not tell the size of a log: {error}") from error
    sizes, lengths = replies[::2], replies[1::2]
    total = sum(length for size, length in zip(sizes, lengths, strict=True) if size is not None)
    return sum(size for size in sizes if size is not None) / total if total else None


def _measures(log: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return ("MEMORY", "USAGE", log), ("XLEN", log)
