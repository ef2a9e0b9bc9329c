"""A model is unpublished: refused while it is used, then gone with all its keys but finished logs."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
from pagestream.v1.inference_pb2 import FINISH_REASON_ERROR, REQUEST_STATE_FINISHED
from pagestream_streams import (
    AppendKind,
    Broker,
    GatewaySession,
    ModelInUse,
    ModelNotFound,
    PartitionGone,
    RequestsUnfinished,
    scripts,
    unpublish,
)
from pagestream_streams.connection import Call
from pagestream_streams.limits import EndCounter, read_usage
from support.protocol.token_streams import CALM, MODEL, TENANT, card, ending, lapse, numbers, read_all, spec, worker
from support.redis.topologies import Place, find_keys

pytestmark = pytest.mark.served

UNAWARE = dataclasses.replace(CALM, directory_ttl_s=1000.0)
"""A gateway with these reads the models once: it goes on to know one that is unpublished."""


async def test_usage_that_no_gateway_has_counted_is_counted(broker: Broker) -> None:
    async with GatewaySession(broker) as gateway, worker(broker) as engine:
        await gateway.ends.timer.stop()
        await gateway.accept(spec())
        await engine.generate((await engine.claim())[0], 3, finish=True)
    await unpublish(broker, MODEL, wait_s=20.0, count_ended=EndCounter(broker).count_partition)
    [row] = await read_usage(broker, since_s=7200, tenant=TENANT)
    assert (row.requests, row.output_tokens) == (1, 3)


async def test_a_model_in_use_stays(broker: Broker) -> None:
    async with GatewaySession(broker) as gateway:
        async with worker(broker):
            with pytest.raises(ModelInUse, match="1 engine serves 'test/model': engine:"):
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
            engine.session.held.drop([owned.request_id])
            await engine.session.lease.stop()
            await lapse(broker, engine.session)
            await gateway.accept(waiting)
            assert await unpublish(broker, MODEL, end_requests=True, wait_s=20.0) == 3
        assert await broker.models() == []
        with pytest.raises(ModelNotFound):
            await gateway.place(MODEL, [1], TENANT)
        for request in (begun, owned, waiting):
            view = await broker.view(request.request_id, TENANT)
            assert (view.state, view.finish_reason) == (REQUEST_STATE_FINISHED, FINISH_REASON_ERROR)
            assert (await read_all(gateway, request.request_id))[-1].end.error.code == "model_removed"
        assert numbers(await read_all(gateway, done.request_id)) == [100, 101]
    left = {key for key in find_keys(redis_server, "ps:{*") if b":req:" not in key and b":log:" not in key}
    closed = {f"{broker.connection.keyspace.partition(MODEL, number).prefix}removed".encode() for number in range(2)}
    assert left == closed
    with pytest.raises(ModelNotFound):
        await unpublish(broker, MODEL)
    await broker.publish_model(card(), partitions=5)  # a new model, with a number of its own
    assert await broker.directory.partitions(MODEL) == 5


def interrupted(monkeypatch: pytest.MonkeyPatch, broker: Broker, step: Any) -> None:
    """Take a step once before the partitions are closed, after the last look at them."""
    run_many, steps = broker.connection.run_many, [step]

    async def run(calls: Sequence[Call]) -> list[Any]:
        if steps and calls and calls[0].script is scripts.FORGET and calls[0].arguments[1]:
            await steps.pop()()
        return await run_many(calls)

    monkeypatch.setattr(broker.connection, "run_many", run)


async def test_a_gateway_that_still_knows_the_model_loses_no_request(
    broker: Broker, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It accepts one after the last look at the partitions, which is ended, and none after they were closed."""
    async with await Broker.connect(redis_url, UNAWARE) as unaware, GatewaySession(unaware) as gateway:
        early, late, anew = spec(), spec(partition=1), spec(partition=1)
        assert await unaware.directory.partitions(MODEL) == 2

        async def accept() -> None:
            assert await gateway.accept(early)

        interrupted(monkeypatch, broker, accept)
        assert await unpublish(broker, MODEL, end_requests=True) == 1
        assert (await read_all(gateway, early.request_id))[-1].end.error.code == "model_removed"
        with pytest.raises(ModelNotFound):
            await gateway.accept(late)
        await broker.publish_model(card(MODEL), partitions=2)
        async with GatewaySession(broker) as aware, worker(broker) as engine:
            assert await aware.accept(anew)
            [claim] = await engine.claim()
            assert claim.request_id == anew.request_id
            await engine.generate(claim, 1, finish=True)


async def test_a_model_that_is_published_again_meanwhile_keeps_its_requests(
    broker: Broker, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with await Broker.connect(redis_url, CALM) as other, GatewaySession(other) as gateway:
        request, later = spec(), spec(partition=1)

        async def publish_again() -> None:
            await other.publish_model(card(MODEL), partitions=2)
            await gateway.accept(request)

        interrupted(monkeypatch, broker, publish_again)
        with pytest.raises(ModelInUse, match="published again"):
            await unpublish(broker, MODEL, end_requests=True)
        await gateway.accept(later)
        async with worker(other) as engine:
            claims = await engine.claim(2)
        assert {claim.request_id for claim in claims} == {request.request_id, later.request_id}


async def test_a_retired_engine_finishes_its_streams_first(broker: Broker) -> None:
    async with GatewaySession(broker) as gateway, worker(broker) as engine:
        await gateway.accept(spec())
        [claim] = await engine.claim()
        digest = await engine.generate(claim, 2)
        await engine.session.retire()
        with pytest.raises(ModelInUse, match="engine:"):
            await unpublish(broker, MODEL, end_requests=True)
        outcome = await engine.append(claim, 2, ending(digest, count=2))
        assert outcome.kind is AppendKind.OK


async def test_what_is_quarantined_in_a_partition_that_is_gone_is_read_and_not_requeued(broker: Broker) -> None:
    async with GatewaySession(broker) as gateway:
        gone, stays = spec(partition=1), spec(partition=0)
        for request in (gone, stays):
            await gateway.accept(request)
            where = await broker.directory.locate(request.request_id)
            await broker.connection.execute("HSET", where.request(request.request_id), "died_on", "a b ", "died_at", 0)
            await broker.connection.execute("ZADD", where.prefix + "verdicts", 1, request.request_id)
            await broker.end_request(where, request.request_id, "error", condition="verdicts", error="quarantined\0x")
        await unpublish(broker, MODEL)
        await broker.publish_model(card(MODEL), partitions=1)
        await broker.models()
        with pytest.raises(PartitionGone, match="partition 1, and its model was published anew with 1"):
            await broker.requeue(gone.request_id)
        assert (await read_all(gateway, gone.request_id))[-1].end.error.code == "quarantined"
        assert not await gateway.accept(gone)
        made = await broker.requeue(stays.request_id)
        assert await broker.requeue(stays.request_id) == made
        async with worker(broker) as engine:
            [claim] = await engine.claim()
        assert claim.request_id == made
