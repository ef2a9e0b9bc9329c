"""Maps of an engine's blocks: published while somebody looks, gone soon after, with the requests that hold them."""

from pathlib import Path

import pytest
from pagestream.v1.records_pb2 import BlockMap
from pagestream_engine.kv_cache import HELD
from pagestream_streams import Broker, GatewaySession
from pagestream_streams.admin import KEPT_MS, WATCHED_MS, BlockMaps, read_engine_loads
from support.engines.arithmetic_worker import MODEL, TENANT, SlowRunner, accepted, running_worker
from support.protocol.token_streams import eventually

pytestmark = pytest.mark.served
PROMPT = [*range(1, 40)]


@pytest.mark.parametrize("engine_core", [pytest.param("inline", marks=pytest.mark.slow), "process"])
async def test_a_watched_engine_publishes_who_holds_its_blocks(
    redis_url: str, tmp_path: Path, engine_core: str
) -> None:
    async with (
        await Broker.connect(redis_url) as broker,
        running_worker(broker, tmp_path, SlowRunner, engine_core=engine_core),
        GatewaySession(broker) as gateway,
    ):
        maps, keyspace = BlockMaps(broker.connection), broker.connection.keyspace
        [load] = (await read_engine_loads(broker, [MODEL]))[MODEL]
        specs = [await accepted(gateway, PROMPT, max_tokens=900, n=n) for n in (1, 2)]
        assert not await maps.is_watched(MODEL)
        found: list[BlockMap] = []

        async def is_shown() -> bool:
            found[:] = [each for each in await maps.watch([MODEL], [load.engine_id]) if each is not None]
            return bool(found) and found[0].num_running == 3 and not any(each.is_prefill for each in found[0].sequences)

        await eventually(is_shown)
        [shown] = found
        ids = [(each.request_id, each.choice, each.tenant) for each in shown.sequences]
        assert sorted(ids) == sorted(
            [(specs[0].request_id, 0, TENANT)] + [(specs[1].request_id, choice, TENANT) for choice in (0, 1)]
        )
        held = [shown.holders[cell - HELD] for cell in shown.cells if cell >= HELD]
        assert len(held) == shown.num_blocks - shown.num_free
        assert [each.num_references for each in held if len(each.sequences) == 3] == [3] * (len(PROMPT) // 16)
        assert shown.num_prompt_tokens >= len(PROMPT)
        key, watched = keyspace.block_map(load.engine_id), keyspace.watched(MODEL)
        assert 0 < await broker.connection.execute("PTTL", watched) <= WATCHED_MS
        assert await broker.connection.execute("PTTL", key) <= KEPT_MS
        await broker.connection.execute("DEL", watched)

        async def is_gone() -> bool:
            return await broker.connection.execute("EXISTS", key) == 0

        await eventually(is_gone)
