"""What the files of all tenants take together."""

from __future__ import annotations

from pagestream_streams.connection.connection import Connection
from pagestream_streams.scripts import REPORT_BYTES, SWEEP_FILES


async def report(connection: Connection, tag: str, num_bytes: int) -> int:
    """Record what a tenant's files take; return the bytes of all tenants. Unavailable.

    Both are known where their keys are, on two nodes of a cluster perhaps. So what is held in all may pass a bound by
    the parts that are being written.
    """
    total: int = await connection.run(REPORT_BYTES, connection.keyspace.stored_bytes, tag, num_bytes)
    return total


async def all_bytes(connection: Connection) -> int:
    """Return the bytes of all tenants, as they were reported. Unavailable."""
    return int(await connection.execute("HGET", connection.keyspace.stored_bytes, "") or 0)


async def sweep(connection: Connection) -> None:
    """Remove what has expired of all tenants, and record anew what each one's files take. Unavailable."""
    keyspace = connection.keyspace
    for name in await connection.execute("HKEYS", keyspace.stored_bytes):
        if tag := name.decode():
            await report(connection, tag, await connection.run(SWEEP_FILES, keyspace.batches(tag)))
