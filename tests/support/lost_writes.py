"""A machine that dies: Redis comes back on an append-only file that is behind what it had answered."""

import asyncio
from dataclasses import dataclass
from pathlib import Path

from pagestream_streams import Broker, EmbeddedRedis

_PAUSE_S = 0.005
_LIMIT_S = 20.0


@dataclass(frozen=True)
class DiskState:
    """The append-only file that grows, and how much of it the disk has."""

    file: Path
    size: int


async def disk_state(server: EmbeddedRedis, broker: Broker) -> DiskState:
    """What the disk has once everything that was answered until now is written."""
    async with asyncio.timeout(_LIMIT_S):
        while True:
            info = await broker.connection.execute("INFO", "persistence")
            if not int(info["aof_buffer_length"]) and not int(info["aof_rewrite_in_progress"]):
                break
            await asyncio.sleep(_PAUSE_S)
    file = growing_file(server.data_dir)
    return DiskState(file, file.stat().st_size)


def growing_file(data_dir: Path) -> Path:
    """Redis 7 and its successors keep a folder of files, the last increment grows; Redis 6 has one file."""
    increments = sorted(data_dir.glob("appendonlydir/*.incr.aof"), key=lambda path: int(path.name.split(".")[-3]))
    return increments[-1] if increments else data_dir / "appendonly.aof"


async def die_behind(server: EmbeddedRedis, state: DiskState) -> None:
    """Lose everything after `state`, as a machine does whose disk was behind, and start again."""
    server.kill()
    with state.file.open("rb+") as file:
        file.truncate(state.size)
    await server.start()
