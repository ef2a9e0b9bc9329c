"""A gateway's reads where some partitions answer and others don't."""

import asyncio
import dataclasses
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
from pagestream.v1.records_pb2 import RequestSpec
from pagestream_streams import Broker, StreamsSettings, Unavailable
from pagestream_streams.connection.base import Topology
from pagestream_streams.connection.connection import Connection
from pagestream_streams.connection.scripts import POLL
from pagestream_streams.gateway.follower import Follower
from pagestream_streams.gateway.readers import Readers
from pagestream_streams.protocol.keys import Partition
from redis import exceptions
from support.protocol.token_streams import eventually

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
        if sha != POLL.sha:
            return 1
        self.num_polls += 1
        return [5, 0] * (len(command) - 5)


async def refuse(_: RequestSpec, __: bool) -> None:
    raise Unavailable("nothing is accepted here")


@contextmanager
def readers_of(topology: HalfATopology, settings: StreamsSettings = SETTINGS) -> Iterator[Readers]:
    connection = Connection("redis://127.0.0.1:1", settings, cast(Topology, topology))
    broker = SimpleNamespace(settings=settings, connection=connection)
    yield Readers(cast(Broker, broker), "gateway:1", refuse)


def follower(readers: Readers, where: Partition, request_id: str) -> Follower:
    """One that has read its log to the third entry, and waits."""
    made = Follower(where, request_id, tenant="t", from_index=0, digest="", limits=readers.limits)
    made.take_log_read_request()
    made.waiting_since = float("-inf")
    readers.join(made)
    return made


@pytest.mark.parametrize("leaver", [True, False])
@pytest.mark.parametrize("waits_there", [True, False])
async def test_one_partition_away_keeps_no_other_from_its_logs(leaver: bool, waits_there: bool) -> None:
    topology = HalfATopology()
    with readers_of(topology) as readers:
        waiting = follower(readers, THERE, "healthy")
        stranded = follower(readers, AWAY, "stranded") if waits_there else None
        if leaver:
            readers.registrations.leave(AWAY, "gone")
        readers.start()
        try:
            async with asyncio.timeout(10):
                while not waiting.take_log_read_request():
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
            waiting = [follower(readers, where, where.prefix) for where in (AWAY, THERE)]
            readers.start()
            try:
                async with asyncio.timeout(10):
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
        waiting = follower(readers, THERE, "waiting")
        readers.registrations.leave(AWAY, "gone")
        readers.start()
        try:
            async with asyncio.timeout(15):
                while waiting.failure is None:
                    await waiting.wait(0.05)
        finally:
            await readers.timer.stop()
    assert isinstance(waiting.failure, Unavailable)


async def test_a_partition_that_was_away_long_ago_has_its_whole_time_again() -> None:
    topology = HalfATopology()
    with readers_of(topology) as readers, pytest.MonkeyPatch.context() as patch:
        stranded = follower(readers, AWAY, "stranded")
        now = 1000.0
        patch.setattr(time, "monotonic", lambda: now)
        await readers.maintain()
        now += 60  # no follower waited meanwhile
        for _ in range(2):
            await readers.maintain()
            assert stranded.failure is None
            now += SETTINGS.outage_limit_s * 0.6
        await readers.maintain()
        assert isinstance(stranded.failure, Unavailable)
