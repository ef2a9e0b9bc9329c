"""Run a script for many partitions: in one run each 64 of them, where the server is no cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from pagestream_streams.connection.connection import Call, Connection
from pagestream_streams.connection.error_translation import translated_replies
from pagestream_streams.connection.scripts import Script
from pagestream_streams.errors import Unavailable
from pagestream_streams.protocol.keys import Partition
from pagestream_streams.protocol.records import Argument

_PARTITIONS_A_RUN = 64  # 0.6 to 1.4 ms of Redis for beats and sweeps
_CALLS_AT_ONCE = 128  # 4 ms of the caller


async def run_on_each(
    connection: Connection,
    script: Script,
    partitions: Sequence[Partition],
    arguments: Sequence[Argument],
    limit_s: float | None = None,
) -> list[Any]:
    """Run a script for many partitions; Unavailable in place of the reply of each where it can't run.

    A cluster gets one run for each partition, any other server one for _PARTITIONS_A_RUN of them, which costs the
    caller a tenth. `limit_s`: seconds after which a silent server counts as unreachable.
    """
    if len(arguments) != script.num_arguments:
        raise ValueError(f"{script.name}: expected {script.num_arguments} arguments, got {len(arguments)}")
    prefixes = [where.prefix for where in partitions]
    size = 1 if connection.is_cluster else _PARTITIONS_A_RUN
    groups = [prefixes[first : first + size] for first in range(0, len(prefixes), size)]
    calls = [Call(script, group[0], (*arguments, *group[1:])) for group in groups]
    # In parts, so that no work on hundreds of commands holds up the event loop.
    parts = [calls[first : first + _CALLS_AT_ONCE] for first in range(0, len(calls), _CALLS_AT_ONCE)]
    found = await asyncio.gather(*(_replies(connection, part, limit_s) for part in parts))
    replies: list[Any] = []
    for group, reply in zip(groups, (reply for part in found for reply in part), strict=True):
        replies += [reply] * len(group) if isinstance(reply, Unavailable) else reply
    return translated_replies(replies)


async def _replies(connection: Connection, calls: Sequence[Call], limit_s: float | None) -> Sequence[Any]:
    try:
        return await connection.run_each(calls, limit_s)
    except Unavailable as error:
        return [error] * len(calls)
