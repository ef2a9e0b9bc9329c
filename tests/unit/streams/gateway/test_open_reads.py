"""The open reads of a gateway, by request and by partition."""

from pagestream_streams.byte_budget import ByteBudget
from pagestream_streams.gateway.follower import Follower
from pagestream_streams.gateway.open_reads import OpenReads
from pagestream_streams.gateway.slice_buffer import ReadLimits
from pagestream_streams.protocol.keys import Partition

LIMITS = ReadLimits(buffer_bytes=1, batch_bytes=1, page_entries=1, budget=ByteBudget(1))


class CountedFollower(Follower):
    """Counts how often it is looked at."""

    looks = 0

    @property
    def is_open(self) -> bool:
        self.looks += 1
        return super().is_open


def follower(partition: int, request_id: str) -> CountedFollower:
    return CountedFollower(Partition("m", partition), request_id, tenant="t", from_index=0, digest="", limits=LIMITS)


def test_a_partition_s_registrations_are_found_without_looking_at_other_reads() -> None:
    reads, here, elsewhere = OpenReads(), [follower(0, "a"), follower(0, "a"), follower(0, "b")], follower(1, "c")
    for each in (*here, elsewhere):
        reads.add(each)
    assert reads.unfinished(Partition("m", 0)) == {"a": "t", "b": "t"}
    assert elsewhere.looks == 0
    assert [reads.remove(each) for each in here] == [False, True, True]
    assert reads.unfinished(Partition("m", 0)) == {}
    assert reads.unfinished(Partition("m", 1)) == {"c": "t"}
