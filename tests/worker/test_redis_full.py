"""Redis is full (`maxmemory`, `noeviction`) while streams run: they go on where they were once there is room, no engine
loses its requests, and a new request is refused with the reason.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from pagestream.v1.inference_pb2 import (
    FINISH_REASON_LENGTH,
    REQUEST_STATE_QUEUED,
    REQUEST_STATE_RUNNING,
    TokenIds,
)
from pagestream.v1.inference_pb2 import SamplingParams as SamplingMessage
from pagestream.v1.records_pb2 import LogEntry, RequestSpec
from pagestream_streams import Broker, EmbeddedRedis, GatewaySession, RequestNotFound, RequestView, Unavailable
from redis.asyncio import Redis
from support.engines.arithmetic_worker import (
    MODEL,
    TENANT,
    SlowRunner,
    accepted,
    expected,
    read,
    running_worker,
    tokens,
)
from support.protocol.token_streams import eventually

pytestmark = pytest.mark.served

LONG, MIDDLE, SHORT = 800, 300, 200  # tokens; Redis stays full until short ones are computed, and no long one
ROOM_FOR_ALL = {"num_gpu_blocks_override": 200}
SOME_TOKENS = 20
Memory = Callable[[int], Awaitable[object]]


@pytest.fixture
async def broker(redis_url: str) -> AsyncIterator[Broker]:
    async with await Broker.connect(redis_url) as broker:
        yield broker


@pytest.fixture
async def memory(redis_server: EmbeddedRedis) -> AsyncIterator[Memory]:
    """Sets how many bytes Redis may use: with 1 it refuses every command that needs memory, 0 is no limit."""
    async with Redis(port=redis_server.port) as redis:
        yield lambda amount: redis.config_set("maxmemory", amount)
        await redis.config_set("maxmemory", 0)


async def view(broker: Broker, spec: RequestSpec) -> RequestView:
    return await broker.view(spec.request_id, TENANT)


async def is_under_way(broker: Broker, *specs: RequestSpec) -> None:
    """Wait until each request's log has some tokens."""

    async def have_tokens() -> bool:
        return all([(await view(broker, spec)).next_index > SOME_TOKENS for spec in specs])

    await eventually(have_tokens)


async def appends_are_postponed(caplog: pytest.LogCaptureFixture, count: int = 3) -> None:
    """Wait until Redis has refused `count` more appends for lack of memory."""

    def number() -> int:
        messages = [record.getMessage() for record in caplog.records]
        return sum("append of" in each and "postponed" in each and "maxmemory" in each for each in messages)

    before = number()
    await eventually(lambda: number() >= before + count)


async def leases_are_renewed(broker: Broker) -> None:
    """Wait until a lease that was not renewed would have been swept."""
    queues = await broker.directory.all_partitions(MODEL)

    async def ends() -> list[float]:
        found = [
            await broker.connection.execute("ZRANGE", f"{queue.prefix}leases", 0, -1, "WITHSCORES") for queue in queues
        ]
        return [float(score) for pairs in found for score in pairs[1::2]]

    settings, before = broker.settings, max(await ends())

    async def are_later() -> bool:
        return min(await ends()) > before + settings.lease_ms + 2 * settings.sweep_ms

    await eventually(are_later)


def check(log: list[LogEntry], prompt: list[int], max_tokens: int) -> None:
    """Check that the log is that of an undisturbed run: each token once and in order, one end."""
    assert tokens(log) == expected(prompt, max_tokens)
    assert [entry.HasField("end") for entry in log] == [False] * (max_tokens + 1) + [True]
    assert log[-1].end.reason == FINISH_REASON_LENGTH
    assert log[-1].end.usage.completion_tokens == max_tokens


async def test_streams_go_on_where_they_were_and_no_engine_loses_a_request(
    broker: Broker, memory: Memory, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of two running requests one is computed to its end while Redis is full; a third waits for its room."""
    wanted = [([1, 2], LONG), ([3, 4], SHORT), ([5, 6], SHORT)]
    async with GatewaySession(broker) as gateway:
        async with running_worker(broker, tmp_path, SlowRunner, max_num_seqs=2, **ROOM_FOR_ALL) as running:
            specs = [await accepted(gateway, prompt, max_tokens=count) for prompt, count in wanted[:2]]
            readings = [asyncio.create_task(read(gateway, spec)) for spec in specs]
            await is_under_way(broker, *specs)
            specs.append(await accepted(gateway, wanted[2][0], max_tokens=wanted[2][1]))
            readings.append(asyncio.create_task(read(gateway, specs[2])))
            await memory(1)
            states = [(await view(broker, spec)).state for spec in specs]
            assert states == [REQUEST_STATE_RUNNING, REQUEST_STATE_RUNNING, REQUEST_STATE_QUEUED]
            await appends_are_postponed(caplog)
            logged = [(await view(broker, spec)).next_index for spec in specs]
            await leases_are_renewed(broker)
            assert [(await view(broker, spec)).next_index for spec in specs] == logged
            assert not any(reading.done() for reading in readings)
            await memory(0)
            logs = await asyncio.gather(*readings)
            await running.end()
    for log, (prompt, count) in zip(logs, wanted, strict=True):
        check(log, prompt, count)
    assert [(await view(broker, spec)).attempts for spec in specs] == [1, 1, 1]
    assert await broker.quarantined(MODEL) == []


async def test_a_request_refused_while_it_is_full_is_accepted_under_its_id_when_there_is_room(
    broker: Broker, memory: Memory, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with GatewaySession(broker) as gateway:
        async with running_worker(broker, tmp_path, SlowRunner, **ROOM_FOR_ALL) as running:
            first = await accepted(gateway, [1, 2], max_tokens=MIDDLE)
            reading = asyncio.create_task(read(gateway, first))
            await is_under_way(broker, first)
            await memory(1)
            await appends_are_postponed(caplog)
            late = RequestSpec(
                request_id=await gateway.place(MODEL, [3, 4], TENANT),
                model=MODEL,
                tenant=TENANT,
                prompts=[TokenIds(ids=[3, 4])],
                sampling=SamplingMessage(seed=1, ignore_eos=True, max_tokens=SHORT),
                disconnect_grace_ms=60_000,
                idempotency_key="key",
            )
            for _ in range(2):
                with pytest.raises(Unavailable, match="maxmemory"):
                    await gateway.accept(late)
                with pytest.raises(Unavailable, match="maxmemory"):
                    await gateway.accept_once(late, body_digest="digest")
            with pytest.raises(RequestNotFound):
                await view(broker, late)
            await memory(0)
            assert await gateway.accept_once(late, body_digest="digest") == late
            await gateway.accept(late)
            check(await read(gateway, late), [3, 4], SHORT)
            check(await reading, [1, 2], MIDDLE)
            await running.end()
    assert [(await view(broker, spec)).attempts for spec in (first, late)] == [1, 1]
    assert await broker.quarantined(MODEL) == []


async def test_requests_of_an_engine_that_ends_meanwhile_go_on_at_another(
    broker: Broker, memory: Memory, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with GatewaySession(broker) as gateway, AsyncExitStack() as neighbours:
        async with running_worker(broker, tmp_path / "first", SlowRunner, **ROOM_FOR_ALL) as first:
            spec = await accepted(gateway, [1, 2], max_tokens=LONG)
            reading = asyncio.create_task(read(gateway, spec))
            await is_under_way(broker, spec)
            second = await neighbours.enter_async_context(running_worker(broker, tmp_path / "second", **ROOM_FOR_ALL))
            await memory(1)
            await appends_are_postponed(caplog)
            await first.end()
        assert not reading.done()
        await memory(0)
        check(await reading, [1, 2], LONG)
        await second.end()
    assert (await view(broker, spec)).attempts == 2
    assert await broker.quarantined(MODEL) == []


async def test_requests_of_the_only_engine_that_ends_meanwhile_wait_for_the_next_one(
    broker: Broker, memory: Memory, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with GatewaySession(broker) as gateway:
        async with running_worker(broker, tmp_path / "first", SlowRunner, max_num_seqs=1, **ROOM_FOR_ALL) as first:
            specs = [await accepted(gateway, prompt, max_tokens=LONG) for prompt in ([1, 2], [3, 4])]
            readings = [asyncio.create_task(read(gateway, spec)) for spec in specs]
            await is_under_way(broker, specs[0])
            await memory(1)
            await appends_are_postponed(caplog)
            await first.end()

        async def are_queued() -> bool:
            return all([(await view(broker, spec)).state == REQUEST_STATE_QUEUED for spec in specs])

        await eventually(are_queued)
        assert not any(reading.done() for reading in readings)
        await memory(0)
        async with running_worker(broker, tmp_path / "second", **ROOM_FOR_ALL) as second:
            for reading, prompt in zip(readings, ([1, 2], [3, 4]), strict=True):
                check(await reading, prompt, LONG)
            await second.end()
    assert [(await view(broker, spec)).attempts for spec in specs] == [2, 1]
    assert await broker.quarantined(MODEL) == []
