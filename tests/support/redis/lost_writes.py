"""Simulate a machine's death: Redis restarts on an append-only file that lacks acknowledged writes, and may end in
the middle of what one script wrote.
"""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

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


class Cut(StrEnum):
    """Where the file ends in the last script's writes, which are between MULTI and EXEC."""

    BEFORE_MULTI = "before-multi"
    BEHIND_MULTI = "behind-multi"
    IN_THE_FIRST_WRITE = "in-the-first-write"
    BEHIND_THE_FIRST_WRITE = "behind-the-first-write"
    IN_THE_LAST_WRITE = "in-the-last-write"
    BEFORE_EXEC = "before-exec"
    IN_EXEC = "in-exec"
    BEHIND_EXEC = "behind-exec"


TORN = (Cut.BEHIND_MULTI, Cut.IN_THE_LAST_WRITE, Cut.BEFORE_EXEC)
TORN_COMMANDS = (Cut.IN_THE_LAST_WRITE, Cut.IN_EXEC)


async def cut_state(server: EmbeddedRedis, broker: Broker, key: str, cut: Cut) -> DiskState:
    """Return the file's state with the last script that wrote to `key` cut off at `cut`.

    ValueError where no script did in more than one write.
    """
    state = await disk_state(server, broker)
    data = state.file.read_bytes()[: state.size]
    return DiskState(state.file, _place(data, _last_transaction(data, key.encode()), cut))


class Command(NamedTuple):
    """A command in an append-only file, from byte `begin` up to, not including, `end`."""

    begin: int
    end: int
    arguments: Sequence[bytes]


def commands(data: bytes) -> Iterator[Command]:
    """Parse all commands; ValueError where the file has anything else."""
    place = 0
    while place < len(data):
        begin, arguments = place, []
        count, place = _number(data, place, b"*")
        for _ in range(count):
            length, place = _number(data, place, b"$")
            arguments.append(data[place : place + length])
            place += length + len(b"\r\n")
        yield Command(begin, place, arguments)


def _number(data: bytes, place: int, kind: bytes) -> tuple[int, int]:
    """Parse a line of this type; return its number and where the next line begins."""
    end = data.index(b"\r\n", place)
    if data[place : place + 1] != kind:
        raise ValueError(f"expected {kind!r} at byte {place}, got {data[place:end]!r}")
    return int(data[place + 1 : end]), end + len(b"\r\n")


def _last_transaction(data: bytes, key: bytes) -> Sequence[Command]:
    """Return the commands from MULTI to EXEC."""
    found: Sequence[Command] = ()
    running: list[Command] = []
    for command in commands(data):
        if command.arguments[0] == b"MULTI":
            running = []
        running.append(command)
        if command.arguments[0] == b"EXEC":
            if any(each.arguments[1:2] == [key] for each in running):
                found = running
            running = []
    if len(found) < len(("MULTI", "a write", "a write", "EXEC")):
        raise ValueError(f"no script wrote to {key!r} in more than one write")
    return found


def _place(data: bytes, transaction: Sequence[Command], cut: Cut) -> int:
    multi, first, *_, last, end = transaction
    return {
        Cut.BEFORE_MULTI: multi.begin,
        Cut.BEHIND_MULTI: multi.end,
        Cut.IN_THE_FIRST_WRITE: _middle(data, first),
        Cut.BEHIND_THE_FIRST_WRITE: first.end,
        Cut.IN_THE_LAST_WRITE: _middle(data, last),
        Cut.BEFORE_EXEC: end.begin,
        Cut.IN_EXEC: _middle(data, end),
        Cut.BEHIND_EXEC: end.end,
    }[cut]


def _middle(data: bytes, command: Command) -> int:
    """Return the length of its longest argument."""
    longest = max(command.arguments, key=len)
    return data.index(longest, command.begin) + len(longest) // 2


async def die_behind(server: EmbeddedRedis, state: DiskState) -> None:
    """Lose everything after `state`, as on a machine whose disk was behind, and restart."""
    server.kill()
    with state.file.open("rb+") as file:
        file.truncate(state.size)
    await server.start()


async def start_again(server: EmbeddedRedis, broker: Broker) -> None:
    """Kill the server once its file is complete, and restart it."""
    await disk_state(server, broker)
    server.kill()
    await server.start()
