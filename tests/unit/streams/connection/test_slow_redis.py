"""What is known goes on while Redis is slow, and what is not known is asked for."""

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from pagestream.v1.records_pb2 import LogSlice
from pagestream_streams import Broker, ModelNotFound, StreamsSettings
from pagestream_streams.admin.model_directory import ModelDirectory
from pagestream_streams.admin.sweeper import Sweeper
from pagestream_streams.connection.connection import Connection
from pagestream_streams.connection.wakeups import WakeUpSender, message_of
from pagestream_streams.protocol import ids
from pagestream_streams.protocol.keys import Keyspace, Partition
from support.protocol.token_streams import eventually

SETTINGS = StreamsSettings(directory_ttl_s=0.0)


class SlowModels:
    """Redis with models, which answers after `delay_s`."""

    keyspace = Keyspace()

    def __init__(self) -> None:
        self.names = ["a"]
        self.delay_s = 0.0

    async def execute(self, *_: object) -> dict[bytes, bytes]:
        await asyncio.sleep(self.delay_s)
        return {ids.model_tag(name).encode(): name.encode() for name in self.names}

    async def pipeline(self, commands: Sequence[object]) -> list[list[bytes]]:
        return [[b"1", b"digest", b"4"] for _ in commands]


async def test_a_model_is_missing_only_where_redis_says_so() -> None:
    models = SlowModels()
    directory = ModelDirectory(cast(Connection, models), SETTINGS)
    assert await directory.names() == ["a"]
    models.names.append("b")
    models.delay_s = SETTINGS.beat_limit_s
    assert await directory.names() == ["a"], "beats and sweeps do not wait for news"
    assert await directory.partitions("b") == 4
    assert (await directory.locate(ids.new("b", 1, "t"))).model == "b"
    with pytest.raises(ModelNotFound):
        await directory.partitions("c")


async def test_what_can_not_be_ended_keeps_nothing_else_from_its_end() -> None:
    late = [str(number).encode() for number in range(100)]
    ended = []

    async def end(_: Partition, name: str, *__: object, **___: object) -> None:
        if name == "0":
            raise ValueError("a record that can't be read")
        ended.append(name)

    async def run_each(*_: object) -> list[object]:
        return [[[[], late, [], 0, [], 1, 0]]]

    async def partitions() -> list[Partition]:
        return [Partition("a", 0)]

    broker = SimpleNamespace(
        settings=SETTINGS, connection=SimpleNamespace(run_each=run_each, is_cluster=False), end=end
    )
    sweeper = Sweeper(cast(Broker, broker), partitions)
    for turn in (1, 2):
        await sweeper.sweep()
        await sweeper.end_due()
        assert len(ended) == turn * 99, "nothing counts as being ended any more"


async def test_a_gateway_that_hears_slowly_has_one_message_on_its_way() -> None:
    """The others have theirs, and what comes meanwhile goes with the next."""
    heard: list[tuple[str, int]] = []
    open_now, most = 0, 0
    release = asyncio.Event()

    class Slow:
        keyspace = Keyspace()

        async def pipeline(self, commands: Sequence[Any], limit_s: float) -> list[int]:
            nonlocal open_now, most
            [(_, channel, data)] = commands
            open_now += 1
            most = max(most, open_now)
            if "slow" in channel:
                await release.wait()
            heard.append((channel, len(data)))
            open_now -= 1
            return [1]

    wake_ups = WakeUpSender(cast(Connection, Slow()), 1.0)
    for number in range(200):
        wake_ups.send([(message_of(LogSlice(request_id="r", first_index=number)), b"slow quick ")])
        await asyncio.sleep(0)
    await eventually(lambda: sum("quick" in channel for channel, _ in heard) > 0)
    assert not any("slow" in channel for channel, _ in heard)
    assert most <= 2
    release.set()
    await eventually(lambda: not wake_ups.is_sending)
    assert sum("slow" in channel for channel, _ in heard) == 2
    release.clear()
    wake_ups.send([(message_of(LogSlice(request_id="r")), b"slow ")])
    await asyncio.sleep(0)
    await wake_ups.stop()
    assert not wake_ups.is_sending
