"""One read of one log, without Redis: when it believes a wake-up, and when it looks into the log."""

import asyncio
from collections.abc import Callable, Sequence

import pytest
from pagestream.v1.records_pb2 import LogEntry, LogSlice
from pagestream_streams.byte_budget import ByteBudget
from pagestream_streams.errors import DigestMismatch
from pagestream_streams.gateway.follower import Follower
from pagestream_streams.gateway.slice_buffer import ReadLimits
from pagestream_streams.protocol.keys import Partition
from support.protocol.token_streams import ending, numbers, tokens

LOG = tokens(range(100, 110))


def limits(budget: ByteBudget | None = None, *, buffer_bytes: int = 10_000, batch_bytes: int = 10_000) -> ReadLimits:
    return ReadLimits(
        buffer_bytes=buffer_bytes, batch_bytes=batch_bytes, page_entries=100, budget=budget or ByteBudget(100_000)
    )


def follower(from_index: int = 0, digest: str = "", bounds: ReadLimits | None = None) -> Follower:
    made = Follower(Partition("m", 0), "r", tenant="t", from_index=from_index, digest=digest, limits=bounds or limits())
    assert made.take_log_read_request()
    return made


def log_slice(first: int, entries: Sequence[LogEntry], previous: str = "") -> bytes:
    made = LogSlice(request_id="r", first_index=first, entries=entries, previous_digest=previous)
    return made.SerializeToString()


def test_a_slice_that_follows_is_taken_and_a_gap_sends_to_the_log() -> None:
    reader = follower()
    reader.offer(log_slice(0, LOG[:3]))
    reader.offer(log_slice(3, LOG[3:5], LOG[2].digest))
    assert numbers(reader.take_buffered()) == [100, 101, 102, 103, 104]
    reader.offer(log_slice(6, LOG[6:8], LOG[5].digest))
    assert reader.take_buffered() == []
    assert reader.take_log_read_request()
    assert reader.next_index == 5


def test_a_slice_that_overlaps_is_cut() -> None:
    reader = follower()
    reader.offer(log_slice(0, LOG[:3]))
    reader.offer(log_slice(1, LOG[1:5], LOG[0].digest))
    assert numbers(reader.take_buffered()) == [100, 101, 102, 103, 104]


@pytest.mark.parametrize("previous", ["", "f" * 16])
def test_a_slice_of_another_generation_is_not_taken(previous: str) -> None:
    reader = follower()
    reader.offer(log_slice(0, LOG[:3]))
    assert len(reader.take_buffered()) == 3
    reader.offer(log_slice(3, tokens([7, 8], "another"), previous))
    assert reader.take_buffered() == []
    assert reader.take_log_read_request()


def test_a_reader_ahead_of_a_log_that_lost_entries_looks_as_soon_as_it_is_reached() -> None:
    reader = follower(5, LOG[4].digest)
    reader.offer(log_slice(3, LOG[3:5], LOG[2].digest))
    assert not reader.take_log_read_request()
    reader.offer(log_slice(5, LOG[5:6], LOG[4].digest))
    assert reader.take_log_read_request()
    assert reader.log_start == 4
    assert numbers(reader.take_logged(4, LOG[4:6])) == [105]
    reader.offer(log_slice(6, LOG[6:7], LOG[5].digest))
    assert numbers(reader.take_buffered()) == [106]


def test_a_log_that_ended_otherwise_at_the_readers_place_is_data_loss() -> None:
    reader = follower()
    reader.offer(log_slice(0, LOG[:6]))
    assert len(reader.take_buffered()) == 6
    other = [*LOG[:4], *ending(LOG[3].digest, count=4)]
    reader.end_at(len(other))
    assert reader.take_log_read_request()
    with pytest.raises(DigestMismatch):
        reader.take_logged(reader.log_start, other[reader.log_start :])


async def test_waiting_ends_with_news_or_with_time() -> None:
    reader = follower()
    waiting = asyncio.create_task(reader.wait(20.0))
    await asyncio.sleep(0)
    assert reader.waiting_since is not None
    reader.offer(log_slice(0, LOG[:1]))
    async with asyncio.timeout(5.0):
        await waiting
    assert reader.waiting_since is None
    await reader.wait(0.001)
    reader.request_log_read()
    await reader.wait(20.0)


def test_a_reader_whose_consumer_has_stopped_keeps_nothing() -> None:
    """The budget of all readers is the sum of what they hold, and is free again when they read on or leave."""
    budget = ByteBudget(1500)
    bounds = limits(budget, buffer_bytes=700)
    stopped, other = follower(bounds=bounds), follower(bounds=bounds)
    entries = tokens(range(100))
    for number, entry in enumerate(entries):
        stopped.offer(log_slice(number, [entry]))
        assert stopped.buffer.num_bytes == budget.held_bytes <= 700
    assert budget.held_bytes == 0, "the log has it all"
    assert stopped.take_log_read_request()
    assert numbers(stopped.take_logged(0, entries)) == list(range(100))
    crowd = [follower(bounds=bounds) for _ in range(100)]
    for each in crowd:
        each.offer(log_slice(0, entries[:4]))
        assert budget.held_bytes == sum(each.buffer.num_bytes for each in crowd) <= 1500
    other.offer(log_slice(0, entries[:4]))
    assert other.take_log_read_request(), "there is no room for it"
    assert numbers(crowd[0].take_buffered()) == [0, 1, 2, 3]
    for each in crowd:
        each.buffer.clear()
    assert budget.held_bytes == 0


def test_a_consumer_gets_parts_of_what_waits() -> None:
    entries = tokens(range(40))
    reader = follower(bounds=limits(batch_bytes=1))
    for first in range(0, 40, 10):
        reader.offer(log_slice(first, entries[first : first + 10]))
    parts = []
    while part := reader.take_buffered():
        parts.append(numbers(part))
    assert parts == [list(range(first, first + 10)) for first in range(0, 40, 10)]


def test_what_is_no_slice_sends_to_the_log() -> None:
    for broken in (b"\xff\xff", log_slice(0, [])):
        reader = follower()
        reader.offer(broken)
        assert reader.take_buffered() == []
        assert reader.take_log_read_request()


def test_pages_of_the_log_are_as_large_as_its_entries_are_small() -> None:
    reader = follower(bounds=limits(batch_bytes=16_400))
    first = reader.page_entries
    reader.note_page(first, first * 100)
    assert (first, reader.page_entries) == (16, 100)
    reader.note_page(100, 100 * 9_936)
    assert reader.page_entries == 1


async def waiting(reader: Follower) -> asyncio.Task[None]:
    """Return the task of a consumer that waits."""
    task = asyncio.create_task(reader.wait(30))
    await asyncio.sleep(0)
    return task


def followed_by(sink: Callable[[Sequence[LogEntry]], bool]) -> Follower:
    """Return a follower that has taken an entry."""
    reader = Follower(Partition("m", 0), "r", tenant="t", from_index=0, digest="", limits=limits(), sink=sink)
    assert reader.take_log_read_request()
    reader.offer(log_slice(0, LOG[:1]))
    assert len(reader.take_buffered()) == 1
    return reader


async def test_a_sink_takes_what_follows_while_the_consumer_waits() -> None:
    passed: list[int] = []
    reader = followed_by(lambda entries: passed.extend(numbers(entries)) is None)
    await reader.wait(30)  # was woken by the first entry
    reader.offer(log_slice(1, LOG[1:2], LOG[0].digest))
    assert not passed  # nothing waits: the consumer is at work
    assert len(reader.take_buffered()) == 1
    await reader.wait(30)
    task = await waiting(reader)
    reader.offer(log_slice(2, LOG[2:4], LOG[1].digest))
    assert (passed, reader.next_index, bool(reader.buffer)) == ([102, 103], 4, False)
    reader.offer(log_slice(5, LOG[5:6], LOG[4].digest))
    assert passed == [102, 103]
    await task
    assert reader.take_buffered() == []
    assert reader.take_log_read_request()


async def test_what_a_sink_leaves_waits_for_the_consumer_in_order() -> None:
    calls: list[int] = []
    reader = followed_by(lambda entries: calls.append(len(entries)) is not None)
    await reader.wait(30)
    task = await waiting(reader)
    reader.offer(log_slice(1, LOG[1:2], LOG[0].digest))
    reader.offer(log_slice(2, LOG[2:3], LOG[1].digest))
    assert calls == [1]  # the second stands behind the first
    await task
    assert numbers(reader.take_buffered()) == [101, 102]


async def test_the_end_and_what_a_sink_raises_are_for_the_consumers_task() -> None:
    def refuse(entries: Sequence[LogEntry]) -> bool:
        raise KeyError(len(entries))

    reader = followed_by(refuse)
    await reader.wait(30)
    task = await waiting(reader)
    end = ending(LOG[0].digest, count=1)
    reader.offer(log_slice(1, end, LOG[0].digest))
    await task
    assert reader.take_buffered() == end
    reader = followed_by(refuse)
    await reader.wait(30)
    task = await waiting(reader)
    reader.offer(log_slice(1, LOG[1:2], LOG[0].digest))
    with pytest.raises(KeyError):
        await task


def test_wake_ups_that_are_late_are_not_lost() -> None:
    reader = follower()
    reader.offer(log_slice(0, LOG[:3]))
    assert len(reader.take_buffered()) == 3
    assert not reader.misses(5), "they may be on their way"
    reader.offer(log_slice(3, LOG[3:4], LOG[2].digest))
    assert len(reader.take_buffered()) == 1
    assert not reader.misses(8), "they come, if late"
    assert reader.misses(8), "none has come since"
    reader.request_log_read()
    assert numbers(reader.take_logged(4, LOG[4:8])) == [104, 105, 106, 107]
    assert not reader.misses(8)
    assert not reader.misses(9)


def test_after_a_gap_the_first_poll_that_finds_more_has_the_log_read() -> None:
    reader = follower()
    reader.suspect_loss()
    assert reader.is_after_gap
    assert reader.misses(1)
    reader.request_log_read()
    assert not reader.is_after_gap
    reader.suspect_loss()
    assert not reader.misses(0), "it has all"
    assert not reader.misses(1), "and then others are late"
