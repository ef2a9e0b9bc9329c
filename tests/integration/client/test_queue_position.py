"""Where a queued request stands, over gRPC and HTTP: the same, and null where it is not known."""

import asyncio
from contextlib import AsyncExitStack

from pagestream_client import AsyncClient, RequestState
from pagestream_client.http import AsyncHttpClient
from pagestream_streams import Broker
from pagestream_streams.protocol.keys import Partition
from support.clients.gateway_clients import gateway_settings, running_address
from support.engines.synthetic_engine import MODEL, synthetic_card

LIMIT_S = 30.0


async def test_position_and_expected_wait_come_with_the_request(redis_url: str) -> None:
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(asyncio.timeout(LIMIT_S))
        broker = await stack.enter_async_context(await Broker.connect(redis_url))
        await broker.publish_model(synthetic_card(), partitions=4)
        address = await stack.enter_async_context(running_address(gateway_settings(redis_url)))
        grpc = await stack.enter_async_context(AsyncClient(address.target))
        http = await stack.enter_async_context(AsyncHttpClient([address.url]))
        ids = []
        for number in range(6):  # one after the other, on several partitions
            stream = grpc.generate(MODEL, f"prompt {number}", max_tokens=4, on_disconnect="continue")
            ids.append(await (await stack.enter_async_context(stream)).accepted())
        assert len({(await broker.directory.locate(each)).number for each in ids}) > 1
        seen = [await grpc.get_request(each) for each in ids]
        assert [info.queue_position for info in seen] == [0, 1, 2, 3, 4, 5]
        assert {info.expected_wait_ms for info in seen} == {None}, "no engine lives"

        # As an engine's registration and its claims of the last second leave it.
        now, _ = await broker.connection.execute("TIME")
        await broker.connection.execute("ZADD", broker.connection.keyspace.engines(MODEL), (now + 600) * 1000, "e")
        drained = "drain_from", now * 1000, "drained", 1, "drained_tokens", 10
        await broker.connection.execute("HSET", f"{Partition(MODEL, 0).prefix}meta", *drained)
        await asyncio.sleep(0.05)  # for longer than gateways use what they have read of the queues
        by_grpc, by_http = await grpc.get_request(ids[-1]), await http.get_request(ids[-1])
        for info in (by_grpc, by_http):
            assert (info.state, info.queue_position) == (RequestState.QUEUED, 5)
            assert info.expected_wait_ms is not None
            assert info.expected_wait_ms > 0
