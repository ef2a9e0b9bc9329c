"""A model is unpublished: refused while it is used, then gone with all its keys but finished logs."""

import pytest
from pagestream.v1.inference_pb2 import FINISH_REASON_ERROR, REQUEST_STATE_FINISHED
from pagestream_streams import Broker, GatewaySession, ModelInUse, ModelNotFound, RequestsUnfinished, unpublish
from support.protocol.token_streams import MODEL, TENANT, card, numbers, read_all, spec, worker
from support.redis.topologies import Place, find_keys


async def test_a_model_in_use_stays(broker: Broker) -> None:
    async with GatewaySession(broker) as gateway:
        async with worker(broker):
            with pytest.raises(ModelInUse, match="1 engines serve 'test/model', such as engine:"):
                await unpublish(broker, MODEL, end_requests=True)
        await gateway.accept(spec(partition=1))
        with pytest.raises(RequestsUnfinished, match="1 requests of 'test/model'"):
            await unpublish(broker, MODEL)
    assert [info.name for info in await broker.models()] == [MODEL]


async def test_unfinished_requests_end_and_finished_logs_stay(broker: Broker, redis_server: Place) -> None:
    """Those that wait, those that began, and those that an engine owned which has died since."""
    async with GatewaySession(broker) as gateway:
        done, begun, owned, waiting = spec(), spec(), spec(partition=1), spec(partition=1, priority=2)
        async with worker(broker, "dies") as engine:
            for request in (done, begun, owned):
                await gateway.accept(request)
            claims = {claim.request_id: claim for claim in await engine.claim(3)}
            await engine.generate(claims[done.request_id], 2, finish=True)
            await engine.generate(claims[begun.request_id], 1)
            await engine.session.hand_back([begun.request_id])
            engine.session.active_requests.drop([owned.request_id])
            await engine.session.heartbeat.stop()
            await broker.connection.execute("DEL", broker.connection.keyspace.engines(MODEL))
            await gateway.accept(waiting)
            assert await unpublish(broker, MODEL, end_requests=True) == 3
        assert await broker.models() == []
        with pytest.raises(ModelNotFound):
            await gateway.place(MODEL, [1], TENANT)
        for request in (begun, owned, waiting):
            view = await broker.view(request.request_id, TENANT)
            assert (view.state, view.finish_reason) == (REQUEST_STATE_FINISHED, FINISH_REASON_ERROR)
            assert (await read_all(gateway, request.request_id))[-1].end.error.code == "model_removed"
        assert numbers(await read_all(gateway, done.request_id)) == [100, 101]
    left = {key for key in find_keys(redis_server, "ps:{*") if b":req:" not in key and b":log:" not in key}
    assert left == set()
    with pytest.raises(ModelNotFound):
        await unpublish(broker, MODEL)
    await broker.publish_model(card(), partitions=5)  # a new model, with a number of its own
    assert await broker.partitions(MODEL) == 5
