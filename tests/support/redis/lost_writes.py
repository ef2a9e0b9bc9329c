"""Simulate a machine's death: Redis restarts on an append-only file that lacks acknowledged writes."""

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pagestream_streams import Broker, EmbeddedRedis, Unavailable

_PAUSE_S = 0.005
_LIMIT_S = 20.0


@dataclass(frozen=True)
class DiskState:
    """The growing append-only file, and how many of its bytes the disk has."""

    file: Path
    size: int


async def disk_state(server: EmbeddedRedis, broker: Broker) -> DiskState:
    """Wait until all acknowledged writes are in the file, and return its state."""
    async with asyncio.timeout(_LIMIT_S):
        while True:
            with suppress(Unavailable):  # a connection was closed
                info = await broker.connection.execute("INFO", "persistence")
                rewrites = int(info["aof_rewrite_in_progress"]) or int(info["aof_rewrite_scheduled"])
                if not int(info["aof_buffer_length"]) and not rewrites:
                    break
            await asyncio.sleep(_PAUSE_S)
    file = growing_file(server.data_dir)
    return DiskState(file, file.stat().st_size)


def growing_file(data_dir: Path) -> Path:
    """Return the growing file: the last increment in Redis 7's folder, the only file of Redis 6."""
    increments = sorted(data_dir.glob("appendonlydir/*.incr.aof"), key=lambda path: int(path.name.split(".")[-3]))
    return increments[-1] if increments else data_dir / "appendonly.aof"


async def die_behind(server: EmbeddedRedis, state: DiskState) -> None:
    """Lose everything after `state`, as on a machine whose disk was behind, and restart."""
    server.kill()
    with state.file.open("rb+") as file:
        file.truncate(state.size)
    await server.start()
