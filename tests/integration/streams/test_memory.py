"""What a request and a token take of Redis' memory, and that retention gives it back."""

import dataclasses

from pagestream_streams import Broker, GatewaySession
from pagestream_streams.protocol.keys import Partition
from support.protocol.token_streams import FAST, MODEL, append_of, card, ending, eventually, spec, tokens, worker
from support.redis.topologies import Place, find_keys

HERE = Partition(MODEL, 0)
TOKENS = 2000
MOST_BYTES_A_TOKEN = 64
MOST_BYTES_A_REQUEST = 4096  # without its prompt, which is two to three bytes a token more


async def usage(broker: Broker, key: str) -> int:
    return int(await broker.connection.execute("MEMORY", "USAGE", key, "SAMPLES", 0) or 0)


async def test_a_token_and_a_request_are_small(broker: Broker) -> None:
    async with GatewaySession(broker) as gateway, worker(broker) as engine:
        request = spec()
        await gateway.accept(request)
        record = await usage(broker, f"{HERE.prefix}req:{request.request_id}")
        assert 0 < record < MOST_BYTES_A_REQUEST
        [claim] = await engine.claim()
        digest = ""
        for first in range(0, TOKENS, 100):
            entries = tokens(range(100 + first, 200 + first), digest)
            digest = entries[-1].digest
            await engine.session.append([append_of(claim, first, entries)])
        log = await usage(broker, HERE.log(request.request_id))
        print(f"{record} bytes a request, {log / TOKENS:.1f} bytes a token")
        assert log / TOKENS < MOST_BYTES_A_TOKEN


async def test_retention_gives_everything_back(redis_url: str, redis_server: Place) -> None:
    short = dataclasses.replace(FAST, retention_s=1)
    async with await Broker.connect(redis_url, short) as broker:
        await broker.publish_model(card(), partitions=2)
        async with GatewaySession(broker) as gateway, worker(broker) as engine:
            request = spec()
            await gateway.accept(request)
            [claim] = await engine.claim()
            entries = tokens([100])
            entries += ending(entries[-1].digest, count=1)
            await engine.session.append([append_of(claim, 0, entries)])

            await eventually(lambda: not find_keys(redis_server, f"*{request.request_id}*"))
            members = find_keys(redis_server, f"{HERE.prefix}*")
            for key in members:
                assert request.request_id.encode() not in await broker.connection.execute("DUMP", key)
