"""A discarded request: marked at once, gone soon, and read to its end by those who read it."""

import pytest
from pagestream_streams import Broker, GatewaySession, discard_request
from pagestream_streams.admin.broker import DISCARDED_KEPT_S
from pagestream_streams.errors import RequestNotFound
from support.protocol.token_streams import TENANT, read_all, spec, worker


async def test_a_discarded_request_ends_and_expires(broker: Broker) -> None:
    async with GatewaySession(broker) as gateway, worker(broker) as engine:
        request = spec()
        await gateway.accept(request)
        [claim] = await engine.claim()
        await engine.generate(claim, 3)
        with pytest.raises(RequestNotFound):
            await discard_request(broker, request.request_id, "another")
        assert not (await broker.view(request.request_id, TENANT)).is_discarded
        for _ in range(2):
            await discard_request(broker, request.request_id, TENANT)
        assert (await broker.view(request.request_id, TENANT)).is_discarded
        where = await broker.directory.locate(request.request_id)
        for key in (f"{where.prefix}req:{request.request_id}", f"{where.prefix}log:{request.request_id}"):
            assert 0 < await broker.connection.execute("TTL", key) <= DISCARDED_KEPT_S
        assert (await read_all(gateway, request.request_id))[-1].HasField("end")


async def test_a_retry_with_its_key_does_not_renew_what_was_discarded(broker: Broker) -> None:
    async with GatewaySession(broker) as gateway, worker(broker) as engine:
        first, retry = spec(key="k"), spec(key="k")
        await gateway.accept_once(first, body_digest="d")
        [claim] = await engine.claim()
        await engine.generate(claim, 3, finish=True)
        await discard_request(broker, first.request_id, TENANT)
        assert (await gateway.accept_once(retry, body_digest="d")).request_id == first.request_id
        where = await broker.directory.locate(first.request_id)
        for key in (where.request(first.request_id), where.log(first.request_id)):
            assert 0 < await broker.connection.execute("TTL", key) <= DISCARDED_KEPT_S
