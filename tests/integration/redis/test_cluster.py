"""What only a cluster has: partitions on different masters, and slots that move from one to the other."""

import asyncio

from pagestream_streams import Broker, GatewaySession, Unavailable
from support.protocol.token_streams import FAST, MODEL, card, numbers, read_all, spec, worker
from support.redis.topologies import Topology, fresh


async def patiently_accept(gateway: GatewaySession, partition: int) -> str:
    """Repeat the call under the same id, as a client does after UNAVAILABLE."""
    request = spec(partition=partition)
    async with asyncio.timeout(30):
        while True:
            try:
                await gateway.accept(request)
            except Unavailable:
                await asyncio.sleep(0.1)
            else:
                return request.request_id


async def test_partitions_lie_on_different_masters_and_all_work(cluster: Topology) -> None:
    async with await Broker.connect(fresh(cluster), FAST) as broker:
        await broker.publish_model(card(MODEL), partitions=8)
        async with GatewaySession(broker) as gateway, worker(broker) as engine:
            ids = [await patiently_accept(gateway, partition) for partition in range(8)]
            reading = [asyncio.create_task(read_all(gateway, request_id)) for request_id in ids]
            for claim in await engine.claim(8):
                await engine.generate(claim, 3, finish=True)
            for log in await asyncio.gather(*reading):
                assert numbers(log) == [100, 101, 102]
        assert sum(int(str(each.ask("DBSIZE"))) > 0 for each in cluster.masters()) >= 2
