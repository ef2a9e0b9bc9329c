"""What the page shows of engines: one tenant's requests by id, all others' as one, and nothing to who has no key."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from pagestream.v1.records_pb2 import BlockHolders, BlockMap, RunningSequence
from pagestream_streams import Broker, EmbeddedRedis
from pagestream_streams.admin import BlockMaps, read_engine_loads
from support.clients.gateway_clients import Address, bearer, gateway_settings, running_address, write_keys
from support.engines.synthetic_engine import MODEL, SyntheticEngine, running_engine
from support.processes.waiting import LIMIT_S
from support.protocol.token_streams import eventually
from support.redis.servers import emptied

pytestmark = [pytest.mark.served, pytest.mark.asyncio(loop_scope="module")]

FREE, CACHED, OTHERS, HELD = 0, 1, 2, 3
"""A cell as the page gets it; HELD + i is held by `holders[i]`."""
TOO_MANY = 200_000
"""Cells of a map that is larger than what is read."""
SEQUENCES = [("id-of-a", "a"), ("id-of-b", "b"), ("other-of-a", "a"), ("other-of-b", "b")]
MAP = BlockMap(
    num_blocks=7,
    num_free=3,
    num_cached=1,
    block_size=16,
    cells=[0, 1, 2, 3, 4, 5, 0],
    holders=[
        BlockHolders(sequences=[0], num_references=1),
        BlockHolders(sequences=[1, 3], num_references=2),
        BlockHolders(sequences=[0, 2], num_references=2),
        BlockHolders(sequences=[0, 1, 3], num_references=3),
    ],
    sequences=[RunningSequence(request_id=name, tenant=tenant, num_blocks=2) for name, tenant in SEQUENCES],
    num_running=4,
    num_waiting=1,
    at_ms=5,
)


@pytest.fixture
def redis_url(redis_server: EmbeddedRedis) -> str:
    """The URL of a Redis without any keys: what is watched stands there for a while."""
    return emptied(redis_server)


@pytest_asyncio.fixture(loop_scope="module")
async def engine(redis_url: str) -> AsyncIterator[SyntheticEngine]:
    async with running_engine(redis_url) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def http(engine: SyntheticEngine, redis_url: str) -> AsyncIterator[httpx.AsyncClient]:
    async with running_address(gateway_settings(redis_url)) as address:
        async with httpx.AsyncClient(base_url=address.url, timeout=LIMIT_S) as client:
            yield client


@pytest_asyncio.fixture(loop_scope="module")
async def guarded(engine: SyntheticEngine, redis_url: str, tmp_path: Path) -> AsyncIterator[Address]:
    keys = write_keys(tmp_path / "keys", {f"key-{name}": name for name in "abc"})
    async with running_address(gateway_settings(redis_url, keys=keys)) as address:
        yield address


async def engine_id_of(broker: Broker) -> str:
    """Return the engine's id once it lives."""
    found: list[str] = []

    async def lives() -> bool:
        found[:] = [load.engine_id for load in (await read_engine_loads(broker, [MODEL])).get(MODEL, [])]
        return bool(found)

    await eventually(lives)
    return found[0]


@pytest_asyncio.fixture(loop_scope="module")
async def maps(engine: SyntheticEngine, redis_url: str) -> AsyncIterator[BlockMaps]:
    """Publish the map as the engine's."""
    async with await Broker.connect(redis_url) as broker:
        maps = BlockMaps(broker.connection)
        await maps.publish(await engine_id_of(broker), MAP)
        yield maps


async def view(client: httpx.AsyncClient, tenant: str) -> tuple[dict[str, Any], str]:
    answer = await client.get("/page/state", headers=bearer(f"key-{tenant}"))
    assert answer.status_code == 200, answer.text
    assert answer.headers["cache-control"] == "no-store"
    [model] = answer.json()["models"]
    [engine] = model["engines"]
    assert (model["name"], engine["running"], engine["waiting"]) == (MODEL, 4, 1)
    return engine["blocks"], answer.text


async def test_a_tenant_sees_its_own_requests_and_the_others_as_one(maps: BlockMaps, guarded: Address) -> None:
    async with httpx.AsyncClient(base_url=guarded.url) as client:
        blocks, text = await view(client, "a")
        assert blocks["cells"] == [FREE, CACHED, HELD, OTHERS, HELD + 1, HELD + 2, FREE]
        assert [each["request_id"] for each in blocks["sequences"]] == ["id-of-a", "other-of-a"]
        assert blocks["holders"] == [
            {"sequences": [0], "count": 1},
            {"sequences": [0, 1], "count": 2},
            {"sequences": [0], "count": 1},  # whether it is shared with another tenant is not the reader's to know
        ]
        assert "of-b" not in text
        blocks, text = await view(client, "c")
        assert set(blocks["cells"]) == {FREE, CACHED, OTHERS}
        assert not any(name in text for name, _ in SEQUENCES)
        assert await maps.is_watched(MODEL)


async def test_without_a_key_there_is_nothing_and_no_engine_is_asked(maps: BlockMaps, guarded: Address) -> None:
    async with httpx.AsyncClient(base_url=guarded.url) as client:
        assert (await client.get("/page/state")).status_code == 401
    assert not await maps.is_watched(MODEL)


async def test_without_keys_the_caller_sees_the_default_tenants(
    engine: SyntheticEngine, http: httpx.AsyncClient, maps: BlockMaps
) -> None:
    [model] = (await http.get("/page/state")).json()["models"]
    assert {row["requests"] for row in model["queues"]} == {0}
    assert set(model["engines"][0]["blocks"]["cells"]) == {FREE, CACHED, OTHERS}, "all of these are other tenants'"


async def test_a_map_that_cannot_be_read_or_is_too_large_is_none(
    maps: BlockMaps, redis_url: str, http: httpx.AsyncClient
) -> None:
    async with await Broker.connect(redis_url) as broker:
        engine_id = await engine_id_of(broker)
        key = broker.connection.keyspace.block_map(engine_id)
        await broker.connection.execute("SET", key, b"\xff\xff")
        assert await maps.watch([MODEL], [engine_id, "unknown"]) == [None, None]
        await broker.connection.execute("DEL", key)
        await maps.publish(engine_id, BlockMap(cells=[1] * TOO_MANY))
        assert await maps.watch([MODEL], [engine_id]) == [None]
    assert json.loads((await http.get("/page/state")).text)["models"][0]["engines"][0]["blocks"] is None
