"""`pagestream top` on a real Redis."""

import asyncio
import json

import pytest
from pagestream.v1.records_pb2 import BlockMap
from pagestream_cli.__main__ import main as pagestream
from pagestream_streams import Broker, GatewaySession
from pagestream_streams.admin import BlockMaps
from support.protocol.token_streams import CALM, MODEL, card, spec, worker

pytestmark = pytest.mark.served


async def test_a_reading_has_the_engines_their_requests_and_the_queue(
    redis_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async def top(*arguments: str) -> str:
        assert await asyncio.to_thread(pagestream, ["top", *arguments, "--redis", redis_url]) == 0
        return capsys.readouterr().out

    assert await top() == "no model is published\n"
    async with await Broker.connect(redis_url, CALM) as broker:
        await broker.publish_model(card(), partitions=2)
        async with GatewaySession(broker) as gateway, worker(broker, "a") as engine:
            await gateway.accept(spec())
            assert len(await engine.claim()) == 1
            await gateway.accept(spec(prompt=range(7), partition=1))
            [found] = json.loads(await top("--json"))
            assert (found["name"], found["running"]) == (MODEL, 1)
            assert [each["engine_id"] for each in found["engines"]] == [engine.session.engine_id]
            waiting = [(each["name"], each["requests"], each["tokens"]) for each in found["queues"] if each["requests"]]
            assert waiting == [("0", 1, 7)]
            assert f"{MODEL}: 1 engines, 1 requests running, 1 queued" in await top("--once")
            maps = BlockMaps(broker.connection)
            await maps.publish(engine.session.engine_id, BlockMap(num_blocks=3, cells=[0, 1, 0]))
            assert "    ·░·\n" in await top("--once", "--blocks")
            assert await maps.is_watched(MODEL)
    assert await asyncio.to_thread(pagestream, ["top", "--redis", redis_url, "--interval", "0"]) == 2
