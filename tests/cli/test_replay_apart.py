"""`pagestream replay` beside the requests of others: none of them may suffer for it."""

import asyncio
from contextlib import aclosing
from dataclasses import replace

import pytest
from pagestream.v1.inference_pb2 import ON_DISCONNECT_CONTINUE, REQUEST_STATE_FINISHED
from pagestream.v1.records_pb2 import RequestSpec
from pagestream_cli.__main__ import main
from pagestream_streams import Broker, GatewaySession
from pagestream_streams.gateway.accept import Acceptor
from support.processes.waiting import LIMIT_S
from support.protocol.token_streams import FAST, MODEL, TENANT, Worker, card, read_all, spec, worker

pytestmark = pytest.mark.served

QUICK = replace(FAST, lease_ms=2000)


async def replay(redis_url: str, request_id: str) -> int:
    """Run the command in a thread; return its status."""
    command = ["replay", request_id, "--redis", redis_url, "--tenant", TENANT, "--limit", str(LIMIT_S)]
    return await asyncio.to_thread(main, command)


async def answered(gateway: GatewaySession, engine: Worker) -> str:
    request = spec()
    await gateway.accept(request)
    [claim] = await engine.claim()
    await engine.generate(claim, 3, finish=True)
    await read_all(gateway, request.request_id)
    return request.request_id


async def die(gateway: GatewaySession) -> None:
    """What SIGKILL does to a gateway."""
    for task in (gateway.heartbeat, gateway.sweeper, gateway.readers.timer, gateway.subscription):
        await task.stop()


async def test_while_every_gateway_is_away_it_ends_no_other_request(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("lease_ms", "heartbeat_ms", "sweep_ms", "sweep_gap_ms", "silence_ms"):
        monkeypatch.setenv(f"PAGESTREAM_BROKER__{name.upper()}", str(getattr(QUICK, name)))
    async with await Broker.connect(redis_url, QUICK) as broker:
        await broker.publish_model(card(), partitions=1)
        async with GatewaySession(broker) as gateway, worker(broker) as engine:
            past, live = await answered(gateway, engine), spec(grace_ms=100)
            await gateway.accept(live)
            [claim] = await engine.claim()
            await engine.generate(claim, 1)
            async with aclosing(gateway.read(live.request_id, tenant=TENANT)) as batches:
                await anext(batches)
                await die(gateway)
                await asyncio.sleep(QUICK.lease_ms / 1000)
                replaying = asyncio.create_task(replay(redis_url, past))
                [copy] = await engine.claim()
                assert copy.spec.on_disconnect == ON_DISCONNECT_CONTINUE  # no reader is registered
                assert copy.spec.deadline_ms > LIMIT_S * 1000  # and it ends where the command is killed
                # Time in which a sweeping gateway would take the dead one's reader for gone, and end the grace.
                await asyncio.sleep(4 * QUICK.lease_ms / 1000)
                assert (await broker.view(live.request_id, TENANT)).state != REQUEST_STATE_FINISHED
                await engine.generate(copy, 3, finish=True)
                assert await replaying == 0, "it is equal"


async def test_a_copy_whose_accept_was_not_answered_is_cancelled(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No reader is registered whose leaving would end it."""
    accept, copies = Acceptor.accept, list[str]()

    async def unanswered(self: Acceptor, request: RequestSpec) -> bool:
        await accept(self, request)
        copies.append(request.request_id)
        raise TimeoutError

    async with await Broker.connect(redis_url, QUICK) as broker:
        await broker.publish_model(card(), partitions=1)
        async with GatewaySession(broker) as gateway, worker(broker) as engine:
            past = await answered(gateway, engine)
        monkeypatch.setattr(Acceptor, "accept", unanswered)
        assert await replay(redis_url, past) == 2
        [copy] = copies
        assert (await broker.view(copy, TENANT)).state == REQUEST_STATE_FINISHED


async def test_a_quarantined_request_is_not_given_to_the_deployment_again(
    redis_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async with await Broker.connect(redis_url, QUICK) as broker:
        await broker.publish_model(card(), partitions=1)
        request = spec()
        async with GatewaySession(broker) as gateway:
            await gateway.accept(request)
            where = await broker.directory.locate(request.request_id)
            await broker.connection.execute("ZADD", f"{where.prefix}verdicts", 1, request.request_id)
            await broker.end_request(
                where, request.request_id, "error", condition="verdicts", error="quarantined\0engines died of it"
            )
        [dead] = await broker.quarantined(MODEL)
        assert dead.request_id == request.request_id
        assert await asyncio.wait_for(replay(redis_url, request.request_id), LIMIT_S) == 2
    said = capsys.readouterr().err
    assert "quarantined" in said
    assert f"pagestream dead requeue {request.request_id}" in said
