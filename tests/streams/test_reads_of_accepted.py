"""A read that follows its accept in one gateway: it is registered, and has what came meanwhile, without a question."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any

import pytest
from pagestream.v1.records_pb2 import LogEntry, LogSlice, ModelCard, RequestSpec
from pagestream_streams import Broker, EngineSession, GatewaySession, RequestNotFound
from support.protocol.token_streams import (
    CALM,
    LIMIT_S,
    MODEL,
    TENANT,
    Worker,
    eventually,
    home_of,
    numbers,
    read_all,
    spec,
    worker,
)
from support.redis.topologies import Place, ask_all, fresh

pytestmark = pytest.mark.served

COUNT = 12
# Or a machine that is late takes wake-ups for lost ones.
UNHURRIED = dataclasses.replace(CALM, poll_ms=60_000)


@pytest.fixture
async def broker(redis_server: Place) -> AsyncIterator[Broker]:
    async with await Broker.connect(fresh(redis_server), UNHURRIED) as broker:
        await broker.publish_model(ModelCard(name=MODEL, max_model_len=10), partitions=1)
        yield broker


@pytest.fixture
def log_reads(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The commands by which logs were read."""
    commands: list[tuple[Any, ...]] = []
    read = broker.connection.read_acknowledged

    async def noted(*command: Any) -> Any:
        commands.append(command)
        return await read(*command)

    monkeypatch.setattr(broker.connection, "read_acknowledged", noted)
    return commands


async def accepted(broker: Broker, gateway: GatewaySession, engine: Worker) -> tuple[RequestSpec, Any]:
    """Accept a request, which an engine claims."""
    request = spec()
    await gateway.accept(request)
    [claim] = await engine.claim()
    return request, claim


async def brought(gateway: GatewaySession, request_id: str, count: int) -> None:
    """Wait until wake-ups have brought so many entries of a request that is not read yet."""

    def num_entries() -> int:
        slices = gateway.readers.registrations.awaited.slices(request_id)
        return sum(len(LogSlice.FromString(packed).entries) for packed in slices)

    await eventually(lambda: num_entries() == count)


async def readers_of(broker: Broker, request_id: str) -> set[str]:
    key = (await broker.directory.locate(request_id)).request(request_id)
    return set((await broker.connection.execute("HGET", key, "readers")).decode().split())


async def registered(broker: Broker, request_id: str, expected: set[str]) -> None:
    """Wait until the request has these readers."""

    async def are_there() -> bool:
        return await readers_of(broker, request_id) == expected

    await eventually(are_there)


@pytest.mark.parametrize("before", [0, 1, COUNT])
async def test_nothing_is_asked_for(broker: Broker, log_reads: list[Any], before: int) -> None:
    async with GatewaySession(broker) as gateway, worker(broker) as engine:
        request, claim = await accepted(broker, gateway, engine)
        digest = await engine.generate(claim, before) if before else ""
        await brought(gateway, request.request_id, before)
        reading = asyncio.create_task(read_all(gateway, request.request_id))
        await eventually(lambda: request.request_id in gateway.readers.reads)
        rest = dataclasses.replace(claim, next_index=before, digest=digest)
        await engine.generate(rest, COUNT, finish=True)
        assert numbers(await reading) == list(range(100, 100 + COUNT))
        assert not log_reads
        # A second read was not expected: it has the same entries from the log.
        assert numbers(await read_all(gateway, request.request_id)) == list(range(100, 100 + COUNT))
        assert log_reads


@pytest.mark.parametrize("is_before", [False, True])
async def test_the_first_entries_bring_the_fingerprint_of_their_engine(broker: Broker, is_before: bool) -> None:
    told = list[tuple[str, int]]()
    seen = list[LogEntry]()

    def take(entries: Sequence[LogEntry]) -> bool:
        seen.extend(entries)
        return True

    def note(fingerprint: str) -> None:
        told.append((fingerprint, len(seen)))

    session = EngineSession(broker, model=MODEL, fingerprint="print", on_lost=lambda _: None)
    async with GatewaySession(broker) as gateway, session:
        engine = Worker(session)
        request, claim = await accepted(broker, gateway, engine)

        async def read() -> None:
            batches = gateway.read(request.request_id, tenant=TENANT, sink=take, on_engine=note)
            async with aclosing(batches):
                async for batch in batches:
                    assert told, "entries before the engine"
                    seen.extend(batch)

        digest = ""
        if is_before:
            digest = await engine.generate(claim, 1)
            await brought(gateway, request.request_id, 1)
        reading = asyncio.create_task(read())
        await eventually(lambda: request.request_id in gateway.readers.reads)
        if not is_before:
            digest = await engine.generate(claim, 1)
        await engine.generate(dataclasses.replace(claim, next_index=1, digest=digest), COUNT, finish=True)
        async with asyncio.timeout(LIMIT_S):
            await reading
        assert numbers(seen) == list(range(100, 100 + COUNT))
        assert told == [("print", 0)]


async def test_what_has_no_room_is_read_from_the_log(
    broker: Broker, log_reads: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with GatewaySession(broker) as gateway, worker(broker) as engine:
        monkeypatch.setattr(home_of(gateway.readers.registrations.awaited), "_EXPECTED_BYTES", 100)
        request, claim = await accepted(broker, gateway, engine)
        awaited = gateway.readers.registrations.awaited
        await engine.generate(claim, COUNT, finish=True)
        await eventually(lambda: not awaited.is_whole(request.request_id))
        assert numbers(await read_all(gateway, request.request_id)) == list(range(100, 100 + COUNT))
        assert log_reads


async def test_wake_ups_that_were_lost_before_the_read(broker: Broker, redis_server: Place) -> None:
    """The subscription ends; what is appended before the next one is in the log alone."""
    async with GatewaySession(broker) as gateway, worker(broker) as engine:
        request, claim = await accepted(broker, gateway, engine)
        awaited = gateway.readers.registrations.awaited
        digest = await engine.generate(claim, 2)
        ask_all(redis_server, "CLIENT", "KILL", "TYPE", "pubsub")
        rest = dataclasses.replace(claim, next_index=2, digest=digest)
        await engine.generate(rest, COUNT, finish=True)
        await eventually(lambda: not awaited.is_whole(request.request_id))
        assert numbers(await read_all(gateway, request.request_id)) == list(range(100, 100 + COUNT))


async def test_an_accept_of_a_request_that_was_there_is_read_from_the_log(broker: Broker) -> None:
    async with GatewaySession(broker) as one, GatewaySession(broker) as other, worker(broker) as engine:
        request, claim = await accepted(broker, one, engine)
        await engine.generate(claim, COUNT, finish=False)
        assert not await other.accept(request)
        reading = asyncio.create_task(read_all(other, request.request_id))
        assert {one.gateway_id, other.gateway_id} <= await readers_of(broker, request.request_id)
        await eventually(lambda: request.request_id in other.readers.reads)
        view = await broker.view(request.request_id, TENANT, with_position=False)
        rest = dataclasses.replace(claim, next_index=COUNT, digest=view.digest)
        await engine.generate(rest, COUNT + 1, finish=True)
        assert numbers(await reading) == list(range(100, 101 + COUNT))


async def test_a_request_that_is_never_read_is_left(broker: Broker) -> None:
    """Neither its registration nor what was kept for it stays."""
    async with GatewaySession(broker) as gateway, worker(broker) as engine:
        request, claim = await accepted(broker, gateway, engine)
        awaited = gateway.readers.registrations.awaited
        await engine.generate(claim, 2)
        await brought(gateway, request.request_id, 2)
        assert awaited.num_bytes > 0
        gateway.readers.registrations.leave_all()
        assert request.request_id not in awaited
        assert awaited.num_bytes == 0
        await gateway.readers.registrations.unregister()
        assert await readers_of(broker, request.request_id) == set()


async def test_a_registration_that_was_taken_back_before_the_read(broker: Broker) -> None:
    """An earlier read's end has it taken back, after the accept that renewed it: the read registers again."""
    async with GatewaySession(broker) as gateway, worker(broker) as engine:
        request, claim = await accepted(broker, gateway, engine)
        registrations = gateway.readers.registrations
        registrations.leave(await broker.directory.locate(request.request_id), request.request_id)
        await registrations.unregister()
        assert await readers_of(broker, request.request_id) == set()
        reading = asyncio.create_task(read_all(gateway, request.request_id))
        await eventually(lambda: request.request_id in gateway.readers.reads)
        await registered(broker, request.request_id, {gateway.gateway_id})
        await engine.generate(claim, COUNT, finish=True)
        assert numbers(await reading) == list(range(100, 100 + COUNT))


async def test_a_registration_that_is_being_taken_back_while_it_is_accepted(broker: Broker) -> None:
    """Which of both scripts Redis runs first is unknown: the read registers."""
    async with GatewaySession(broker) as gateway, worker(broker) as engine:
        request = spec()
        registrations = gateway.readers.registrations
        where = await broker.directory.locate(request.request_id)
        registrations.leave(where, request.request_id)
        unregistering = asyncio.create_task(registrations.unregister())
        await asyncio.sleep(0)  # its script is on the way
        await gateway.accept(request)
        await unregistering
        await broker.connection.execute("HSET", where.request(request.request_id), "readers", "")
        [claim] = await engine.claim()
        reading = asyncio.create_task(read_all(gateway, request.request_id))
        await registered(broker, request.request_id, {gateway.gateway_id})
        await engine.generate(claim, COUNT, finish=True)
        assert numbers(await reading) == list(range(100, 100 + COUNT))


async def test_another_tenant_gets_nothing_of_it(broker: Broker, log_reads: list[Any]) -> None:
    async with GatewaySession(broker) as gateway, worker(broker) as engine:
        request, claim = await accepted(broker, gateway, engine)
        await engine.generate(claim, COUNT, finish=True)
        with pytest.raises(RequestNotFound):
            await anext(gateway.read(request.request_id, tenant="another"))
        await gateway.readers.registrations.unregister()
        assert request.request_id in gateway.readers.registrations.expected
        assert numbers(await read_all(gateway, request.request_id)) == list(range(100, 100 + COUNT))
        assert not log_reads


async def test_of_two_accepts_the_second_has_what_came_before_it_read(broker: Broker) -> None:
    """Both are of one request in one gateway; the wake-ups between them were kept for the first."""
    async with GatewaySession(broker) as gateway, worker(broker) as engine:
        request, claim = await accepted(broker, gateway, engine)
        digest = await engine.generate(claim, 2)
        await brought(gateway, request.request_id, 2)
        assert not await gateway.accept(request)
        assert gateway.readers.registrations.awaited.num_bytes == 0
        reading = asyncio.create_task(read_all(gateway, request.request_id))
        rest = dataclasses.replace(claim, next_index=2, digest=digest)
        await engine.generate(rest, COUNT, finish=True)
        assert numbers(await reading) == list(range(100, 100 + COUNT))
