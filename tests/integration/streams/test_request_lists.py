"""The list of a tenant's requests: what it shows, its pages, its bounds."""

from dataclasses import replace

import pytest
from pagestream.v1.inference_pb2 import REQUEST_STATE_FINISHED, REQUEST_STATE_QUEUED, REQUEST_STATE_RUNNING
from pagestream_streams import Broker, GatewaySession, RequestNotFound, enlist, list_requests
from support.protocol.token_streams import FAST, TENANT, card, spec, worker


async def accept(broker: Broker, gateway: GatewaySession, number: int) -> list[str]:
    """Accept and list so many requests; return their ids, newest first."""
    ids = []
    for _ in range(number):
        request = spec()
        await gateway.accept(request)
        await enlist(broker, request.request_id, TENANT)
        ids.append(request.request_id)
    return ids[::-1]


async def pages(broker: Broker, limit: int) -> list[str]:
    found: list[str] = []
    while True:
        page = await list_requests(broker, TENANT, limit=limit, after=found[-1] if found else "")
        found += [each.request_id for each in page.requests]
        if not page.has_more:
            return found
        assert len(page.requests) == limit


async def test_pages_show_each_request_once_with_its_state(broker: Broker) -> None:
    async with GatewaySession(broker) as gateway, worker(broker) as engine:
        [done] = await accept(broker, gateway, 1)
        [claim] = await engine.claim()
        await engine.generate(claim, 3, finish=True)
        [running] = await accept(broker, gateway, 1)
        [claim] = await engine.claim()
        await engine.generate(claim, 2)
        queued = await accept(broker, gateway, 5)
        expected = [*queued, running, done]
        for limit in (1, 3, 7, 100):
            assert await pages(broker, limit) == expected
        shown = (await list_requests(broker, TENANT, limit=10)).requests
    states = [*[REQUEST_STATE_QUEUED] * 5, REQUEST_STATE_RUNNING, REQUEST_STATE_FINISHED]
    assert [each.state for each in shown] == states
    assert [(each.next_index, each.usage.completion_tokens) for each in shown[-2:]] == [(2, 2), (5, 3)]
    assert [each.accepted_at for each in shown] == sorted((each.accepted_at for each in shown), reverse=True)
    assert (await list_requests(broker, "tenant-b", limit=10)).requests == []


async def test_a_request_whose_record_has_expired_is_taken_out(broker: Broker) -> None:
    name = broker.connection.keyspace.requests(TENANT)
    async with GatewaySession(broker) as gateway:
        ids = await accept(broker, gateway, 5)
        for age, request_id in enumerate(ids[1::2]):
            where = await broker.directory.locate(request_id)
            await broker.connection.execute("DEL", where.request(request_id))
            await broker.connection.execute("ZADD", name, age + 1, request_id)  # an hour and more ago
        assert await pages(broker, 1) == ids[::2]
        with pytest.raises(RequestNotFound):
            await list_requests(broker, TENANT, limit=1, after=ids[1])
    assert await broker.connection.execute("ZCARD", name) == 3
    assert await broker.connection.execute("PTTL", name) > 0


async def test_a_lost_record_that_comes_back_is_shown_again(broker: Broker) -> None:
    async with GatewaySession(broker) as gateway:
        ids = await accept(broker, gateway, 3)
        record = (await broker.directory.locate(ids[1])).request(ids[1])
        await broker.connection.execute("RENAME", record, f"{record}:lost")
        for limit in (1, 2):
            assert await pages(broker, limit) == ids[::2]
        await broker.connection.execute("RENAME", f"{record}:lost", record)
        assert await pages(broker, 1) == ids


async def test_the_newest_are_kept(redis_url: str) -> None:
    async with (
        await Broker.connect(redis_url, replace(FAST, max_listed_requests=3)) as broker,
        GatewaySession(broker) as gateway,
    ):
        await broker.publish_model(card())
        ids = await accept(broker, gateway, 5)
        await enlist(broker, ids[1], TENANT)
        assert await pages(broker, 2) == ids[:3]


async def test_another_tenants_id_is_never_shown(broker: Broker) -> None:
    async with GatewaySession(broker) as gateway:
        request = spec()
        await gateway.accept(request)
        await enlist(broker, request.request_id, "tenant-b")
        assert (await list_requests(broker, "tenant-b", limit=5)).requests == []
