"""Open the log of a claimed request, page by page: the event loop that sends the beats must not stand still."""

from __future__ import annotations

from pagestream_streams.connection.connection import Connection
from pagestream_streams.protocol.keys import Partition
from pagestream_streams.protocol.records import ClaimedLog

PAGE_ENTRIES = 512
"""Most entries of one read, 2 to 4 ms of the loop: 524,288 entries in one read took it 5 s, and its lease."""


async def open_log(connection: Connection, where: Partition, request_id: str) -> ClaimedLog:
    """Read a log. Unavailable; KeyError, ValueError or OverflowError where an entry can't be read."""
    log, start = ClaimedLog(), "-"
    while True:
        rows = await connection.execute("XRANGE", where.log(request_id), start, "+", "COUNT", PAGE_ENTRIES)
        for _, fields in rows:
            log.add(fields)
        if len(rows) < PAGE_ENTRIES:
            return log
        start = f"({rows[-1][0].decode()}"
