"""A worker whose Redis comes back without its last moment: it sends tokens again, drops what is no longer its own, and
runs again what was accepted again. The client's stream has every token once.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from pagestream.v1.records_pb2 import LogEntry, RequestSpec
from pagestream_streams import Broker, EmbeddedRedis, GatewaySession
from support.engines.arithmetic_worker import (
    LIMIT_S,
    MODEL,
    SlowRunner,
    accepted,
    expected,
    running_worker,
    tokens,
)
from support.protocol.token_streams import eventually
from support.redis.servers import DiskState, die_behind, disk_state, running_server

pytestmark = pytest.mark.served

NUM_TOKENS = 300


@pytest.fixture
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    with running_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
async def broker(server: EmbeddedRedis) -> AsyncIterator[Broker]:
    async with await Broker.connect(server.url) as broker:
        yield broker


async def read(gateway: GatewaySession, spec: RequestSpec, seen: list[LogEntry]) -> None:
    async with asyncio.timeout(LIMIT_S):
        async for batch in gateway.read(spec.request_id, tenant=spec.tenant, spec=spec):
            seen += batch


@pytest.mark.parametrize(
    "lost_since", ["accept", pytest.param("first tokens", marks=pytest.mark.slow), "twentieth token"]
)
async def test_the_stream_goes_on(server: EmbeddedRedis, broker: Broker, tmp_path: Path, lost_since: str) -> None:
    async with GatewaySession(broker) as gateway, running_worker(broker, tmp_path, SlowRunner) as running:
        states: dict[str, DiskState] = {"accept": await disk_state(server, broker)}
        spec = await accepted(gateway, [1, 2], max_tokens=NUM_TOKENS)
        seen: list[LogEntry] = []
        reading = asyncio.create_task(read(gateway, spec, seen))
        await eventually(lambda: len(seen) > 0)
        states["first tokens"] = await disk_state(server, broker)
        await eventually(lambda: len(seen) > 20)
        states["twentieth token"] = await disk_state(server, broker)
        await eventually(lambda: len(seen) > 60)
        await die_behind(server, states[lost_since])
        await reading
        assert tokens(seen) == expected([1, 2], NUM_TOKENS)
        assert seen[-1].end.usage.completion_tokens == NUM_TOKENS
        assert [entry.HasField("end") for entry in seen].count(True) == 1
        await eventually(lambda: running.worker.load()["running"] == 0)
        again = await accepted(gateway, [3])
        follow: list[LogEntry] = []
        await read(gateway, again, follow)
        assert tokens(follow) == expected([3])
        assert [info.name for info in await broker.models()] == [MODEL]
        await running.end()
