"""Polls of logs whose wake-ups may be lost, against a connection that answers with lengths."""

from typing import cast

import pytest
from pagestream_streams.byte_budget import ByteBudget
from pagestream_streams.connection.connection import Call, Connection
from pagestream_streams.gateway.follower import Follower
from pagestream_streams.gateway.open_reads import OpenReads
from pagestream_streams.gateway.polling import Poller
from pagestream_streams.gateway.slice_buffer import ReadLimits
from pagestream_streams.protocol.keys import Partition
from pagestream_streams.settings import StreamsSettings

NUM_READS = 500


class LongLogs:
    """Every log has one entry."""

    async def run_each(self, calls: list[Call], limit_s: float) -> list[list[int]]:
        return [[1, 0] * len(call.arguments) for call in calls]


@pytest.fixture
def reads() -> OpenReads:
    made = OpenReads()
    limits = ReadLimits(buffer_bytes=1000, batch_bytes=1000, page_entries=10, budget=ByteBudget(1000))
    for number in range(NUM_READS):
        one = Follower(Partition("m", 0), f"r{number}", tenant="t", from_index=0, digest="", limits=limits)
        one.take_log_read_request()
        made.add(one)
    return made


async def poll(reads: OpenReads) -> int:
    """Poll all reads; return how many logs are to be read."""
    for each in reads:
        each.waiting_since = float("-inf")
    await Poller(cast(Connection, LongLogs()), StreamsSettings(), reads, 1.0).poll()
    return sum(each.take_log_read_request() for each in reads)


async def test_a_process_that_is_late_reads_few_logs_at_once(reads: OpenReads) -> None:
    assert await poll(reads) == 0, "their wake-ups may be on their way"
    begun = await poll(reads)
    assert 0 < begun < NUM_READS / 5


async def test_after_a_gap_all_logs_are_read_at_once(reads: OpenReads) -> None:
    for each in reads:
        each.suspect_loss()
    assert await poll(reads) == NUM_READS
