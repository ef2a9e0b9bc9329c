"""Scripts by their hash: they are loaded again into a server that has forgotten them."""

import pytest
from pagestream_streams import Broker, GatewaySession
from support.protocol.token_streams import TENANT, numbers, read_all, spec, worker
from support.redis.topologies import Place, ask_all, find_keys

pytestmark = pytest.mark.served


async def test_noscript_is_answered_by_the_text(broker: Broker, redis_server: Place) -> None:
    async with GatewaySession(broker) as gateway, worker(broker) as engine:
        request = spec()
        for step in range(3):
            ask_all(redis_server, "SCRIPT", "FLUSH")
            if step == 0:
                await gateway.accept(request)
            elif step == 1:
                [claim] = await engine.claim()
            else:
                await engine.generate(claim, 3, finish=True)
        ask_all(redis_server, "SCRIPT", "FLUSH")
        assert numbers(await read_all(gateway, request.request_id)) == [100, 101, 102]
        assert (await broker.view(request.request_id, TENANT)).next_index == 5


async def test_a_queue_whose_group_is_gone_gets_it_again(broker: Broker) -> None:
    async with GatewaySession(broker) as gateway, worker(broker) as engine:
        request = spec()
        await gateway.accept(request)
        where = await broker.directory.locate(request.request_id)
        await broker.connection.execute("XGROUP", "DESTROY", where.prefix + "queue:0", "engines")
        [claim] = await engine.claim()
        assert claim.request_id == request.request_id


async def test_keys_of_a_request_share_their_hash_tag(broker: Broker, redis_server: Place) -> None:
    async with GatewaySession(broker) as gateway, worker(broker) as engine:
        request = spec(deadline_ms=60_000)
        await gateway.accept(request)
        [claim] = await engine.claim()
        await engine.generate(claim, 1)
        where = await broker.directory.locate(request.request_id)
        keys = find_keys(redis_server, "*")
        theirs = [key for key in keys if request.request_id.encode() in key]
        assert len(theirs) == 2
        assert all(key.startswith(where.prefix.encode()) for key in theirs)
