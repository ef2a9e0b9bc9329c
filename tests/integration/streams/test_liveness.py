"""Leases: a dead engine's work goes on elsewhere, a living engine's never; books are kept equal from both sides."""

import asyncio
import dataclasses
import time
from contextlib import AsyncExitStack
from typing import Any

import pytest
from pagestream.v1.inference_pb2 import (
    FINISH_REASON_CANCELLED,
    FINISH_REASON_DEADLINE,
    FINISH_REASON_STOP,
    REQUEST_STATE_QUEUED,
    REQUEST_STATE_RUNNING,
)
from pagestream.v1.records_pb2 import RequestSpec
from pagestream_streams import AppendKind, Broker, Claim, GatewaySession
from pagestream_streams.connection.scripts import CLAIM, SWEEP
from pagestream_streams.protocol.keys import Partition
from support.protocol.token_streams import (
    FAST,
    MODEL,
    STILL,
    TENANT,
    Worker,
    eventually,
    numbers,
    read_all,
    spec,
    tokens,
    worker,
)
from support.redis.topologies import Place, ask_all, find_keys

# What servers and Sentinels say to each other, and what asks here.
NOT_OURS = ("cmdstat_info", "cmdstat_role", "cmdstat_ping", "cmdstat_replconf")


async def silence(engine: Worker) -> None:
    """What SIGKILL does to an engine: its tasks end, and nothing is said to Redis."""
    await engine.session.heartbeat.stop()
    await engine.session.sweeper.stop()


async def test_reclaim_by_lease(broker: Broker) -> None:
    async with GatewaySession(broker) as gateway, worker(broker, "a") as a, worker(broker, "b") as b:
        request = spec()
        await gateway.accept(request)
        reading = asyncio.create_task(read_all(gateway, request.request_id))
        [old] = await a.claim()
        digest = await a.generate(old, 3)
        await silence(a)
        [new] = await b.claim()
        assert (new.epoch, new.attempts, new.next_index, new.digest) == (2, 2, 3, digest)
        assert new.log.tokens[0].tolist() == [100, 101, 102]
        await b.generate(new, 6, finish=True)
        assert (await a.append(old, 3, tokens([7], digest))).kind in (AppendKind.ENDED, AppendKind.FENCED)
        assert numbers(await reading) == [100, 101, 102, 103, 104, 105]


async def test_no_reclaim_of_a_living_engine(broker: Broker) -> None:
    """Its step takes three leases, and it appends nothing meanwhile."""
    async with GatewaySession(broker) as gateway, worker(broker, "a") as a, worker(broker, "b") as b:
        request = spec()
        await gateway.accept(request)
        [claim] = await a.claim()
        until = asyncio.get_running_loop().time() + 3 * FAST.lease_ms / 1000
        while asyncio.get_running_loop().time() < until:
            assert await b.session.claim(max_requests=1, max_prompt_tokens=100) == []
            await b.session.wait_for_work(0.05)
        assert a.lost == []
        await a.generate(claim, 2, finish=True)
        assert (await broker.view(request.request_id, TENANT)).finish_reason == FINISH_REASON_STOP


async def test_a_zombie_notices(broker: Broker) -> None:
    async with GatewaySession(broker) as gateway, worker(broker, "a") as a, worker(broker, "b") as b:
        await gateway.accept(spec())
        [claim] = await a.claim()
        await silence(a)
        await b.claim()
        a.session.heartbeat.start()
        await eventually(lambda: a.lost == [claim.request_id])


async def test_reclaim_needs_no_traffic(broker: Broker) -> None:
    """No other engine lives, and no call accepts, reads or claims: a gateway's timer alone reclaims."""
    async with GatewaySession(broker) as gateway, worker(broker, "a") as a:
        request = spec()
        await gateway.accept(request)
        await a.claim()
        await silence(a)

        async def is_queued() -> bool:
            return (await broker.view(request.request_id, TENANT)).state == REQUEST_STATE_QUEUED

        await eventually(is_queued)


@pytest.mark.parametrize("number", [5, 50])
async def test_reclaim_costs_what_is_dead(redis_url: str, redis_server: Place, broker: Broker, number: int) -> None:
    """Commands of the sweep that reclaims three requests, whatever the living own."""
    async with (
        await Broker.connect(redis_url, STILL) as still,
        GatewaySession(still) as gateway,
        worker(still, "living") as living,
        worker(still, "dead") as dead,
    ):
        await living.session.sweeper.stop()
        await dead.session.sweeper.stop()
        await gateway.sweeper.stop()
        where = Partition(MODEL, 0)
        for engine, count in ((living, number), (dead, 3)):
            for _ in range(count):
                await gateway.accept(spec())
            owned: list[Claim] = []
            while len(owned) < count:
                owned += await engine.session.claimer.claim_from(where, count - len(owned), 10**6)
        execute = still.connection.execute
        await execute("ZADD", where.prefix + "leases", 1, dead.session.engine_id)
        before = num_calls(redis_server)
        [[reclaimed, *_]] = await still.connection.run(SWEEP, where.prefix, 0, 10**9, 10**6, 10**6, 128, 1, 1, 0)
        assert len(reclaimed) == 3
        assert 0 < num_calls(redis_server) - before < 80


async def test_what_is_due_does_not_hold_up_the_sweeps(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each end waits for Redis, where the settings ask also for its disk: many at once took longer than a sweep may."""
    reclaimed = asyncio.Event()
    end, num_begun = broker.end, 0

    async def slow_end(*arguments: Any, **conditions: Any) -> object:
        nonlocal num_begun
        num_begun += 1
        await reclaimed.wait()
        return await end(*arguments, **conditions)

    monkeypatch.setattr(broker, "end", slow_end)
    async with GatewaySession(broker) as gateway, worker(broker, "dead") as dead:
        await dead.session.sweeper.stop()
        request = spec()
        await gateway.accept(request)
        await dead.claim()
        late = [spec(partition=number % 2, deadline_ms=1) for number in range(80)]
        for each in late:
            await gateway.accept(each)
        await eventually(lambda: num_begun > 0)
        await silence(dead)

        async def is_queued() -> bool:
            return (await broker.view(request.request_id, TENANT)).state == REQUEST_STATE_QUEUED

        await eventually(is_queued)
        reclaimed.set()
        for each in late:
            await eventually(lambda each=each: has_ended(broker, each))  # type: ignore[misc]
        assert num_begun < 2 * len(late), "what is being ended is not ended again by each sweep"
        dead.session.active_requests.drop(list(dead.session.active_requests))


async def has_ended(broker: Broker, request: RequestSpec) -> bool:
    return (await broker.view(request.request_id, TENANT)).finish_reason == FINISH_REASON_DEADLINE


def num_calls(place: Place) -> int:
    """Commands that the servers have run, those of scripts included, without what they say to each other."""
    found = [each for stats in ask_all(place, "INFO", "commandstats") for each in stats.items()]
    return sum(int(each["calls"]) for name, each in found if name not in NOT_OURS)


async def test_only_redis_time_counts(monkeypatch: pytest.MonkeyPatch, broker: Broker) -> None:
    """Accepted and claimed on a machine whose clock is five hours ahead; swept by others."""
    wrong = time.time
    monkeypatch.setattr(time, "time", lambda: wrong() + 5 * 3600)
    monkeypatch.setattr(time, "time_ns", lambda: int((wrong() + 5 * 3600) * 10**9))
    async with GatewaySession(broker) as gateway, worker(broker, "a") as a:
        request = spec(deadline_ms=60_000)
        await gateway.accept(request)
        [claim] = await a.claim()
        monkeypatch.undo()
        async with worker(broker, "b") as b:
            await asyncio.sleep(2 * FAST.lease_ms / 1000)
            assert (a.lost, b.lost) == ([], [])
            await a.generate(claim, 2, finish=True)
        assert (await broker.view(request.request_id, TENANT)).attempts == 1


class TestHandBack:
    async def test_another_engine_goes_on_from_the_same_place(self, broker: Broker) -> None:
        async with GatewaySession(broker) as gateway, worker(broker, "a") as a, worker(broker, "b") as b:
            request = spec()
            await gateway.accept(request)
            [old] = await a.claim()
            digest = await a.generate(old, 3)
            await a.session.hand_back([request.request_id])
            await a.session.hand_back([request.request_id])
            assert (await broker.view(request.request_id, TENANT)).state == REQUEST_STATE_QUEUED
            assert (await a.append(old, 3, tokens([7], digest))).kind is AppendKind.FENCED
            [new] = await b.claim()
            await b.generate(new, 5, finish=True)
            assert numbers(await read_all(gateway, request.request_id)) == [100, 101, 102, 103, 104]

    async def test_closing_a_session_hands_back_what_it_holds(self, broker: Broker) -> None:
        async with GatewaySession(broker) as gateway:
            request = spec()
            await gateway.accept(request)
            async with worker(broker) as engine:
                await engine.claim()
            assert (await broker.view(request.request_id, TENANT)).state == REQUEST_STATE_QUEUED


class TestReconciliation:
    async def test_what_redis_shows_and_the_engine_doesn_t_hold_is_handed_back(self, broker: Broker) -> None:
        """The reply of a claim was lost: the script ran, but its reply did not arrive."""
        async with GatewaySession(broker) as gateway, worker(broker) as engine:
            request = spec()
            await gateway.accept(request)
            where = await broker.directory.locate(request.request_id)
            me = engine.session.engine_id
            arguments = me, "nonce", 1, 100, 0, 1000, FAST.lease_ms, 1000, 0, "", 0, FAST.control_ms
            await broker.connection.run(CLAIM, where.prefix, *arguments)
            assert (await broker.view(request.request_id, TENANT)).state == REQUEST_STATE_RUNNING
            [claim] = await engine.claim()
            assert (claim.request_id, claim.epoch) == (request.request_id, 2)
            assert engine.lost == []

    async def test_what_the_engine_holds_and_redis_doesn_t_show_is_dropped(self, broker: Broker) -> None:
        async with GatewaySession(broker) as gateway, worker(broker) as engine:
            kept, cancelled = spec(), spec(partition=1)
            await gateway.accept(kept)
            await gateway.accept(cancelled)
            await engine.claim(2)
            await broker.cancel(cancelled.request_id, TENANT)
            await eventually(lambda: engine.lost == [cancelled.request_id])

    async def test_claims_on_their_way_are_left_alone(self, broker: Broker) -> None:
        """Many claims and heartbeats cross each other; no request is handed back that an engine has got."""
        async with GatewaySession(broker) as gateway, worker(broker) as engine:
            for number in range(60):
                await gateway.accept(spec(partition=number % 2))
                [claim] = await engine.claim()
                engine.session.heartbeat.nudge()
                assert claim.epoch == 1
                await engine.generate(claim, 1, finish=True)
            assert engine.lost == []


class TestEndsByTime:
    async def test_deadline_of_a_queued_request_without_any_engine(self, broker: Broker) -> None:
        async with GatewaySession(broker) as gateway:
            request = spec(deadline_ms=50, n=2)
            await gateway.accept(request)
            entries = await read_all(gateway, request.request_id)
            reasons = [entry.finish.reason for entry in entries if entry.HasField("finish")]
            assert reasons == [FINISH_REASON_DEADLINE] * 2
            assert entries[-1].end.reason == FINISH_REASON_DEADLINE
            assert await broker.connection.execute("XLEN", f"ps:{{{MODEL}/0}}:queue:0") == 0

    async def test_deadline_of_a_running_request(self, broker: Broker) -> None:
        async with GatewaySession(broker) as gateway, worker(broker) as engine:
            request = spec(deadline_ms=300)
            await gateway.accept(request)
            [claim] = await engine.claim()
            await engine.generate(claim, 2)
            entries = await read_all(gateway, request.request_id)
            assert numbers(entries) == [100, 101]
            assert entries[-1].end.usage.completion_tokens == 2
            await eventually(lambda: engine.lost == [request.request_id])

    async def test_cancel_without_any_engine(self, broker: Broker) -> None:
        async with GatewaySession(broker) as gateway:
            request = spec()
            await gateway.accept(request)
            reading = asyncio.create_task(read_all(gateway, request.request_id))
            assert await broker.cancel(request.request_id, TENANT) == FINISH_REASON_CANCELLED
            assert await broker.cancel(request.request_id, TENANT) == FINISH_REASON_CANCELLED
            assert [entry.WhichOneof("body") for entry in await reading] == ["finish", "end"]

    async def test_cancel_of_an_orphan(self, broker: Broker) -> None:
        async with GatewaySession(broker) as gateway, worker(broker) as engine:
            request = spec()
            await gateway.accept(request)
            await engine.claim()
            await silence(engine)
            assert await broker.cancel(request.request_id, TENANT) == FINISH_REASON_CANCELLED
            assert len(await read_all(gateway, request.request_id)) == 2

    async def test_finished_logs_expire_after_their_retention(
        self, redis_url: str, redis_server: Place, broker: Broker
    ) -> None:
        brief = dataclasses.replace(FAST, retention_s=1)
        async with await Broker.connect(redis_url, brief) as short, GatewaySession(short) as gateway:
            request = spec()
            await gateway.accept(request)
            await short.cancel(request.request_id, TENANT)
            await eventually(lambda: not find_keys(redis_server, f"*{request.request_id}"))


async def test_all_background_tasks_end_at_close(broker: Broker) -> None:
    before = asyncio.all_tasks()
    async with AsyncExitStack() as stack:
        gateway = await stack.enter_async_context(GatewaySession(broker))
        engine = await stack.enter_async_context(worker(broker))
        request = spec()
        await gateway.accept(request)
        await engine.claim()
        assert len(asyncio.all_tasks()) > len(before)
    assert asyncio.all_tasks() == before


async def test_a_beat_publishes_prefixes_beside_the_load(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other would be two waits in a beat where Redis is slow. Each of both waits here for the other."""
    async with worker(broker) as engine:
        heartbeat, prefixes, both = engine.session.heartbeat, engine.session.prefixes, asyncio.Barrier(2)
        await heartbeat.stop()
        publish, load = prefixes.publish, heartbeat._publish_load

        async def publish_prefixes(limit_s: float | None) -> None:
            await both.wait()
            await publish(limit_s)

        async def publish_load() -> None:
            await both.wait()
            await load()

        monkeypatch.setattr(prefixes, "publish", publish_prefixes)
        monkeypatch.setattr(heartbeat, "_publish_load", publish_load)
        await asyncio.wait_for(heartbeat.beat(), 10)
