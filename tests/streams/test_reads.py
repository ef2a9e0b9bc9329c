"""Reads of logs without Redis: when one believes a wake-up, and when it looks into the log."""

import asyncio
import dataclasses
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
from pagestream.v1.inference_pb2 import TokenLogprobs
from pagestream.v1.records_pb2 import LogEntry, LogSlice
from pagestream_streams import Broker, DigestMismatch, StreamsSettings, Unavailable, scripts
from pagestream_streams.connection import Call, Connection
from pagestream_streams.gateway.readers import LogRead, OpenReads, Poller, Readers, ReadLimits, Sink
from pagestream_streams.protocol import Partition, chain
from pagestream_streams.tasks import ByteBudget
from redis import exceptions
from support.processes.waiting import LIMIT_S
from support.protocol.token_streams import ending, eventually, numbers, tokens

LOG = tokens(range(100, 110))


def limits(budget: ByteBudget | None = None, *, buffer_bytes: int = 10_000, batch_bytes: int = 10_000) -> ReadLimits:
    return ReadLimits(
        buffer_bytes=buffer_bytes, batch_bytes=batch_bytes, page_entries=100, budget=budget or ByteBudget(100_000)
    )


def log_read(from_index: int = 0, digest: str = "", bounds: ReadLimits | None = None) -> LogRead:
    made = LogRead(Partition("m", 0), "r", tenant="t", from_index=from_index, digest=digest, limits=bounds or limits())
    assert made.pop_log_read_request()
    return made


def log_slice(first: int, entries: Sequence[LogEntry], previous: str = "") -> bytes:
    made = LogSlice(request_id="r", first_index=first, entries=entries, previous_digest=previous)
    return made.SerializeToString()


def test_a_slice_that_follows_is_taken_and_a_gap_sends_to_the_log() -> None:
    reader = log_read()
    reader.offer(log_slice(0, LOG[:3]))
    reader.offer(log_slice(3, LOG[3:5], LOG[2].digest))
    assert numbers(reader.pop_buffered()) == [100, 101, 102, 103, 104]
    reader.offer(log_slice(6, LOG[6:8], LOG[5].digest))
    assert reader.pop_buffered() == []
    assert reader.pop_log_read_request()
    assert reader.next_index == 5


def test_a_slice_that_overlaps_is_cut() -> None:
    reader = log_read()
    reader.offer(log_slice(0, LOG[:3]))
    reader.offer(log_slice(1, LOG[1:5], LOG[0].digest))
    assert numbers(reader.pop_buffered()) == [100, 101, 102, 103, 104]


@pytest.mark.parametrize("previous", ["", "f" * 16])
def test_a_slice_of_another_generation_is_not_taken(previous: str) -> None:
    reader = log_read()
    reader.offer(log_slice(0, LOG[:3]))
    assert len(reader.pop_buffered()) == 3
    reader.offer(log_slice(3, tokens([7, 8], "another"), previous))
    assert reader.pop_buffered() == []
    assert reader.pop_log_read_request()


def test_a_reader_ahead_of_a_log_that_lost_entries_looks_as_soon_as_it_is_reached() -> None:
    reader = log_read(5, LOG[4].digest)
    reader.offer(log_slice(3, LOG[3:5], LOG[2].digest))
    assert not reader.pop_log_read_request()
    reader.offer(log_slice(5, LOG[5:6], LOG[4].digest))
    assert reader.pop_log_read_request()
    assert reader.log_start == 4
    assert numbers(reader.verify_logged(4, LOG[4:6])) == [105]
    reader.offer(log_slice(6, LOG[6:7], LOG[5].digest))
    assert numbers(reader.pop_buffered()) == [106]


def test_a_log_that_ended_otherwise_at_the_readers_place_is_data_loss() -> None:
    reader = log_read()
    reader.offer(log_slice(0, LOG[:6]))
    assert len(reader.pop_buffered()) == 6
    other = [*LOG[:4], *ending(LOG[3].digest, count=4)]
    reader.end_at(len(other))
    assert reader.pop_log_read_request()
    with pytest.raises(DigestMismatch):
        reader.verify_logged(reader.log_start, other[reader.log_start :])


async def test_waiting_ends_with_news_or_with_time() -> None:
    reader = log_read()
    waiting = asyncio.create_task(reader.wait(20.0))
    await asyncio.sleep(0)
    assert reader.waiting_since is not None
    reader.offer(log_slice(0, LOG[:1]))
    async with asyncio.timeout(LIMIT_S):
        await waiting
    assert reader.waiting_since is None
    await reader.wait(0.001)
    reader.request_log_read()
    await reader.wait(20.0)


def test_a_reader_whose_consumer_has_stopped_keeps_nothing() -> None:
    """The budget of all readers is the sum of what they hold, and is free again when they read on or leave."""
    budget = ByteBudget(1500)
    bounds = limits(budget, buffer_bytes=700)
    stopped, other = log_read(bounds=bounds), log_read(bounds=bounds)
    entries = tokens(range(100))
    for number, entry in enumerate(entries):
        stopped.offer(log_slice(number, [entry]))
        assert stopped.buffer.num_bytes == budget.held_bytes <= 700
    assert budget.held_bytes == 0, "the log has it all"
    assert stopped.pop_log_read_request()
    assert numbers(stopped.verify_logged(0, entries)) == list(range(100))
    crowd = [log_read(bounds=bounds) for _ in range(100)]
    for each in crowd:
        each.offer(log_slice(0, entries[:4]))
        assert budget.held_bytes == sum(each.buffer.num_bytes for each in crowd) <= 1500
    other.offer(log_slice(0, entries[:4]))
    assert other.pop_log_read_request(), "there is no room for it"
    assert numbers(crowd[0].pop_buffered()) == [0, 1, 2, 3]
    for each in crowd:
        each.buffer.clear()
    assert budget.held_bytes == 0


def test_a_consumer_gets_parts_of_what_waits() -> None:
    entries = tokens(range(40))
    reader = log_read(bounds=limits(batch_bytes=1))
    for first in range(0, 40, 10):
        reader.offer(log_slice(first, entries[first : first + 10]))
    parts = []
    while part := reader.pop_buffered():
        parts.append(numbers(part))
    assert parts == [list(range(first, first + 10)) for first in range(0, 40, 10)]


def test_what_is_no_slice_sends_to_the_log() -> None:
    for broken in (b"\xff\xff", log_slice(0, [])):
        reader = log_read()
        reader.offer(broken)
        assert reader.pop_buffered() == []
        assert reader.pop_log_read_request()


def test_pages_of_the_log_are_as_large_as_its_entries_are_small() -> None:
    reader = log_read(bounds=limits(batch_bytes=16_400))
    first = reader.page_entries
    reader.note_page(first, first * 100)
    assert (first, reader.page_entries) == (16, 100)
    reader.note_page(100, 100 * 9_936)
    assert reader.page_entries == 1


async def waiting(reader: LogRead) -> asyncio.Task[None]:
    """Return the task of a consumer that waits."""
    task = asyncio.create_task(reader.wait(30))
    await asyncio.sleep(0)
    return task


def followed_by(sink: Sink) -> LogRead:
    """Return a log_read that has taken an entry."""
    reader = LogRead(Partition("m", 0), "r", tenant="t", from_index=0, digest="", limits=limits(), sink=sink)
    assert reader.pop_log_read_request()
    reader.offer(log_slice(0, LOG[:1]))
    assert len(reader.pop_buffered()) == 1
    return reader


async def test_a_sink_takes_what_follows_while_the_consumer_waits() -> None:
    passed: list[int] = []
    reader = followed_by(lambda entries, _token: passed.extend(numbers(entries)) is None)
    await reader.wait(30)  # was woken by the first entry
    reader.offer(log_slice(1, LOG[1:2], LOG[0].digest))
    assert not passed  # nothing waits: the consumer is at work
    assert len(reader.pop_buffered()) == 1
    await reader.wait(30)
    task = await waiting(reader)
    reader.offer(log_slice(2, LOG[2:4], LOG[1].digest))
    assert (passed, reader.next_index, bool(reader.buffer)) == ([102, 103], 4, False)
    reader.offer(log_slice(5, LOG[5:6], LOG[4].digest))
    assert passed == [102, 103]
    await task
    assert reader.pop_buffered() == []
    assert reader.pop_log_read_request()


async def test_a_sink_is_told_of_a_single_token_that_has_no_log_probabilities() -> None:
    told: list[str] = []
    reader = followed_by(lambda _entries, token: told.append(token.text if token else "more") is None)
    await reader.wait(30)
    reader.offer(log_slice(1, LOG[1:2], LOG[0].digest))
    reader.pop_buffered()
    await reader.wait(30)
    task = await waiting(reader)
    assert LOG[1].token_id
    reader.offer(log_slice(2, LOG[2:3], LOG[1].digest))
    reader.offer(log_slice(3, LOG[3:5], LOG[2].digest))
    known = LogEntry(token_id=7, text="known", logprobs=TokenLogprobs())
    known.digest = chain(LOG[4].digest, known)
    reader.offer(log_slice(5, [known], LOG[4].digest))
    assert told == [LOG[2].text, "more", "more"]
    task.cancel()


async def test_what_a_sink_leaves_waits_for_the_consumer_in_order() -> None:
    calls: list[int] = []
    reader = followed_by(lambda entries, _token: calls.append(len(entries)) is not None)
    await reader.wait(30)
    task = await waiting(reader)
    reader.offer(log_slice(1, LOG[1:2], LOG[0].digest))
    reader.offer(log_slice(2, LOG[2:3], LOG[1].digest))
    assert calls == [1]  # the second stands behind the first
    await task
    assert numbers(reader.pop_buffered()) == [101, 102]


async def test_the_end_and_what_a_sink_raises_are_for_the_consumers_task() -> None:
    def refuse(entries: Sequence[LogEntry], _token: LogEntry | None) -> bool:
        raise KeyError(len(entries))

    reader = followed_by(refuse)
    await reader.wait(30)
    task = await waiting(reader)
    end = ending(LOG[0].digest, count=1)
    reader.offer(log_slice(1, end, LOG[0].digest))
    await task
    assert reader.pop_buffered() == end
    reader = followed_by(refuse)
    await reader.wait(30)
    task = await waiting(reader)
    reader.offer(log_slice(1, LOG[1:2], LOG[0].digest))
    with pytest.raises(KeyError):
        await task


def test_wake_ups_that_are_late_are_not_lost() -> None:
    reader = log_read()
    reader.offer(log_slice(0, LOG[:3]))
    assert len(reader.pop_buffered()) == 3
    assert not reader.misses(5), "they may be on their way"
    reader.offer(log_slice(3, LOG[3:4], LOG[2].digest))
    assert len(reader.pop_buffered()) == 1
    assert not reader.misses(8), "they come, if late"
    assert reader.misses(8), "none has come since"
    reader.request_log_read()
    assert numbers(reader.verify_logged(4, LOG[4:8])) == [104, 105, 106, 107]
    assert not reader.misses(8)
    assert not reader.misses(9)


def test_after_a_gap_the_first_poll_that_finds_more_has_the_log_read() -> None:
    reader = log_read()
    reader.suspect_loss()
    assert reader.is_after_gap
    assert reader.misses(1)
    reader.request_log_read()
    assert not reader.is_after_gap
    reader.suspect_loss()
    assert not reader.misses(0), "it has all"
    assert not reader.misses(1), "and then others are late"


# -- A gateway's reads where some partitions answer and others don't.


AWAY, THERE = Partition("m", 0), Partition("m", 1)
SETTINGS = StreamsSettings(poll_ms=20, outage_limit_s=0.4)


class HalfATopology:
    """A cluster of which one partition's node does not answer; each log of the other has five entries."""

    def __init__(self) -> None:
        self.num_polls = 0
        self.all_away = False

    async def pipeline(self, commands: Sequence[Sequence[Any]], limit_s: float | None = None) -> list[Any]:
        return [self._answer(command) for command in commands]

    def _answer(self, command: Sequence[Any]) -> object:
        _, sha, _, prefix, *_ = command
        if prefix == AWAY.prefix or self.all_away:
            return exceptions.ConnectionError("away")
        if sha != scripts.POLL.sha:
            return 1
        self.num_polls += 1
        return [5, 0] * (len(command) - 5)


@contextmanager
def readers_of(topology: HalfATopology, settings: StreamsSettings = SETTINGS) -> Iterator[Readers]:
    connection = Connection("redis://127.0.0.1:1", settings, cast(Any, topology))
    broker = SimpleNamespace(settings=settings, connection=connection)
    yield Readers(cast(Broker, broker), "gateway:1")


def joined(readers: Readers, where: Partition, request_id: str) -> LogRead:
    """One that has read its log to the third entry, and waits."""
    made = LogRead(where, request_id, tenant="t", from_index=0, digest="", limits=readers.limits)
    made.pop_log_read_request()
    made.waiting_since = float("-inf")
    readers.join(made)
    return made


@pytest.mark.parametrize("leaver", [True, False])
@pytest.mark.parametrize("waits_there", [True, False])
async def test_one_partition_away_keeps_no_other_from_its_logs(leaver: bool, waits_there: bool) -> None:
    topology = HalfATopology()
    with readers_of(topology) as readers:
        waiting = joined(readers, THERE, "healthy")
        stranded = joined(readers, AWAY, "stranded") if waits_there else None
        if leaver:
            readers.registrations.leave(AWAY, "gone")
        readers.start()
        try:
            async with asyncio.timeout(LIMIT_S):
                while not waiting.pop_log_read_request():
                    await waiting.wait(0.05)
                while stranded is not None and stranded.failure is None:
                    waiting.waiting_since = float("-inf")
                    await stranded.wait(0.05)
        finally:
            await readers.timer.stop()
        assert waiting.failure is None
        assert stranded is None or isinstance(stranded.failure, Unavailable)
        assert ("gone" in readers.registrations.leaving) == leaver, "it is taken back when the partition answers"


async def test_an_outage_ends_reads_after_its_limit_and_no_sooner() -> None:
    topology = HalfATopology()
    topology.all_away = True
    patient = dataclasses.replace(SETTINGS, outage_limit_s=30.0)
    for settings, fails in ((SETTINGS, True), (patient, False)):
        with readers_of(topology, settings) as readers:
            waiting = [joined(readers, where, where.prefix) for where in (AWAY, THERE)]
            readers.start()
            try:
                async with asyncio.timeout(LIMIT_S):
                    if fails:
                        for each in waiting:
                            while each.failure is None:
                                await each.wait(0.05)
                    else:
                        await eventually(lambda: len(readers.poller.partitions_away) == 2)
            finally:
                await readers.timer.stop()
            assert all((each.failure is not None) == fails for each in waiting)


async def test_a_silent_redis_is_an_outage_too_whoever_has_left() -> None:
    """Each round of polls waits for its answers, and so does what takes readers back."""

    class Silence(HalfATopology):
        async def pipeline(self, commands: Sequence[Sequence[Any]], limit_s: float | None = None) -> list[Any]:
            assert limit_s is not None
            await asyncio.sleep(limit_s)
            return [TimeoutError("silent")] * len(commands)

    # The limit is that of two beats, a third of a lease each.
    with readers_of(
        Silence(), dataclasses.replace(SETTINGS, lease_ms=600, heartbeat_ms=50, sweep_ms=100, sweep_gap_ms=400)
    ) as readers:
        waiting = joined(readers, THERE, "waiting")
        readers.registrations.leave(AWAY, "gone")
        readers.start()
        try:
            async with asyncio.timeout(LIMIT_S):
                while waiting.failure is None:
                    await waiting.wait(0.05)
        finally:
            await readers.timer.stop()
    assert isinstance(waiting.failure, Unavailable)


async def test_a_partition_that_was_away_long_ago_has_its_whole_time_again() -> None:
    topology = HalfATopology()
    with readers_of(topology) as readers, pytest.MonkeyPatch.context() as patch:
        stranded = joined(readers, AWAY, "stranded")
        now = 1000.0
        patch.setattr(time, "monotonic", lambda: now)
        await readers.maintain()
        now += 60  # no log_read waited meanwhile
        for _ in range(2):
            await readers.maintain()
            assert stranded.failure is None
            now += SETTINGS.outage_limit_s * 0.6
        await readers.maintain()
        assert isinstance(stranded.failure, Unavailable)


# -- Polls of logs whose wake-ups may be lost, against a connection that answers with lengths.


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
        one = LogRead(Partition("m", 0), f"r{number}", tenant="t", from_index=0, digest="", limits=limits)
        one.pop_log_read_request()
        made.add(one)
    return made


async def poll(reads: OpenReads) -> int:
    """Poll all reads; return how many logs are to be read."""
    for each in reads:
        each.waiting_since = float("-inf")
    await Poller(cast(Connection, LongLogs()), StreamsSettings(), reads, 1.0).poll()
    return sum(each.pop_log_read_request() for each in reads)


async def test_a_process_that_is_late_reads_few_logs_at_once(reads: OpenReads) -> None:
    assert await poll(reads) == 0, "their wake-ups may be on their way"
    begun = await poll(reads)
    assert 0 < begun < NUM_READS / 5


async def test_after_a_gap_all_logs_are_read_at_once(reads: OpenReads) -> None:
    for each in reads:
        each.suspect_loss()
    assert await poll(reads) == NUM_READS
