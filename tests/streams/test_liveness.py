"""Leases: a dead engine's work goes on elsewhere, a living engine's never; requests end in any state."""

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from pagestream.v1.inference_pb2 import (
    FINISH_REASON_CANCELLED,
    FINISH_REASON_DEADLINE,
    FINISH_REASON_STOP,
    REQUEST_STATE_FINISHED,
    REQUEST_STATE_QUEUED,
    REQUEST_STATE_RUNNING,
    FinishReason,
)
from pagestream.v1.records_pb2 import RequestSpec
from pagestream_streams import (
    AppendKind,
    Broker,
    Claim,
    EngineSession,
    GatewaySession,
    Unavailable,
    expire_engine,
    scripts,
)
from pagestream_streams.connection import Call, run_on_each
from pagestream_streams.protocol import MAX_PARTITIONS, Partition
from support.protocol.token_streams import (
    CALM,
    LIMIT_S,
    MODEL,
    STILL,
    TENANT,
    Worker,
    card,
    eventually,
    lapse,
    numbers,
    once_there,
    pass_control_time,
    read_all,
    spec,
    tokens,
    worker,
)
from support.redis.topologies import Place, ask_all, find_keys

pytestmark = pytest.mark.served

PREFIX = f"ps:{{{MODEL}/0}}:"
# What servers and Sentinels say to each other, and what asks here.
NOT_OURS = ("cmdstat_info", "cmdstat_role", "cmdstat_ping", "cmdstat_replconf")


async def silence(engine: Worker) -> None:
    """What SIGKILL does to an engine: its tasks end, and nothing is said to Redis."""
    for task in (engine.session.lease, engine.session.sweeper, engine.session.subscription):
        await task.stop()


async def die(broker: Broker, engine: Worker) -> None:
    """What SIGKILL does to an engine, and the time does then."""
    await silence(engine)
    await lapse(broker, engine.session)


async def test_reclaim_by_lease(broker: Broker) -> None:
    async with GatewaySession(broker) as gateway, worker(broker, "a") as a, worker(broker, "b") as b:
        request = spec()
        await gateway.accept(request)
        reading = asyncio.create_task(read_all(gateway, request.request_id))
        [old] = await a.claim()
        digest = await a.generate(old, 3)
        await die(broker, a)
        [new] = await b.claim()
        assert (new.epoch, new.attempts, new.next_index, new.digest) == (2, 2, 3, digest)
        assert new.log.tokens[0].tolist() == [100, 101, 102]
        await b.generate(new, 6, finish=True)
        assert (await a.append(old, 3, tokens([7], digest))).kind in (AppendKind.ENDED, AppendKind.FENCED)
        assert numbers(await reading) == [100, 101, 102, 103, 104, 105]


async def test_no_reclaim_of_a_living_engine(broker: Broker) -> None:
    """It appends nothing; each beat renews its lease, and sweeps go on."""
    async with GatewaySession(broker) as gateway, worker(broker, "a") as a, worker(broker, "b") as b:
        request = spec()
        await gateway.accept(request)
        [claim] = await a.claim()
        leases, until = f"{PREFIX}leases", list[float]()

        async def is_renewed() -> bool:
            until.append(float(await broker.connection.execute("ZSCORE", leases, a.session.engine_id)))
            return until[-1] > until[0]

        for _ in range(3):
            until.clear()
            await eventually(is_renewed)
            assert await b.session.claim(max_requests=1, max_prompt_tokens=100) == []
        assert a.lost == []
        await a.generate(claim, 2, finish=True)
        assert (await broker.view(request.request_id, TENANT)).finish_reason == FINISH_REASON_STOP


async def test_a_zombie_notices(broker: Broker) -> None:
    async with GatewaySession(broker) as gateway, worker(broker, "a") as a, worker(broker, "b") as b:
        await gateway.accept(spec())
        [claim] = await a.claim()
        await die(broker, a)
        await b.claim()
        a.session.lease.start()
        await eventually(lambda: a.lost == [claim.request_id])


async def test_reclaim_needs_no_traffic(broker: Broker) -> None:
    """No other engine lives, and no call accepts, reads or claims: a gateway's timer alone reclaims."""
    async with GatewaySession(broker) as gateway, worker(broker, "a") as a:
        request = spec()
        await gateway.accept(request)
        await a.claim()
        await die(broker, a)

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
        [[reclaimed, *_]] = await still.connection.run(
            scripts.SWEEP, where.prefix, 0, 10**9, 10**6, 10**6, 128, 1, 1, 0
        )
        assert len(reclaimed) == 3
        assert 0 < num_calls(redis_server) - before < 80


async def test_what_is_due_does_not_hold_up_the_sweeps(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each end waits for Redis, where the settings ask also for its disk: many at once took longer than a sweep may.

    What can't be ended is tried again, and keeps no other from its end.
    """
    reclaimed = asyncio.Event()
    end, num_begun, num_refused = broker.end_request, 0, 0

    def refuse() -> None:
        nonlocal num_refused
        num_refused += 1
        raise ValueError("a record that can't be read")

    async def slow_end(*arguments: Any, **conditions: Any) -> object:
        nonlocal num_begun
        num_begun += 1
        await reclaimed.wait()
        if num_refused < 3:
            refuse()
        return await end(*arguments, **conditions)

    monkeypatch.setattr(broker, "end_request", slow_end)
    async with GatewaySession(broker) as gateway, worker(broker, "dead") as dead:
        await dead.session.sweeper.stop()
        request = spec()
        await gateway.accept(request)
        await dead.claim()
        late = [spec(partition=number % 2, deadline_ms=1) for number in range(80)]
        for each in late:
            await gateway.accept(each)
        await eventually(lambda: num_begun > 0)
        await die(broker, dead)

        async def is_queued() -> bool:
            return (await broker.view(request.request_id, TENANT)).state == REQUEST_STATE_QUEUED

        await eventually(is_queued)
        reclaimed.set()
        for each in late:
            await eventually(lambda each=each: has_ended(broker, each))
        assert num_begun < 2 * len(late), "what is being ended is not ended again by each sweep"
        dead.session.held.drop(list(dead.session.held))


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
            for _ in range(3):
                await b.session.sweeper.sweep()
                await b.session.lease.beat()
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
            arguments = me, "nonce", 1, 100, 0, 1000, CALM.lease_ms, 1000, 0, "", 0, CALM.control_ms
            await broker.connection.run(scripts.CLAIM, where.prefix, *arguments)
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
                engine.session.lease.nudge()
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
            request = spec(deadline_ms=3_600_000)
            await gateway.accept(request)
            [claim] = await engine.claim()
            await engine.generate(claim, 2)
            await broker.connection.execute("ZADD", f"{PREFIX}deadlines", "XX", 1, request.request_id)
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
        brief = dataclasses.replace(CALM, retention_s=1)
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
        heartbeat, prefixes, both = engine.session.lease, engine.session.prefixes, asyncio.Barrier(2)
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
        await asyncio.wait_for(heartbeat.beat(), LIMIT_S)


# -- Cancel, deadline and abandonment end a request in any state, with or without engines, and leave its log alone.


LEFTOVERS = ("suspects", "verdicts", "deadlines", "graces", "tenants:0")


class Stage:
    """Brings a request into a state, with the engines that it takes."""

    def __init__(self, broker: Broker, stack: AsyncExitStack) -> None:
        self.broker, self.stack = broker, stack
        self.owner: tuple[Worker, Claim] | None = None

    async def queued(self) -> None:
        """Nothing more: there is no engine."""

    async def claimed(self) -> None:
        engine = await self.stack.enter_async_context(worker(self.broker, "owner"))
        [claim] = await engine.claim()
        self.owner = engine, claim

    async def running(self) -> None:
        await self.claimed()
        assert self.owner is not None
        engine, claim = self.owner
        await engine.generate(claim, 2)

    async def orphaned(self) -> None:
        """Its engine died, and it is not reclaimed yet."""
        engine, claim = await self._mortal("dead")
        await engine.generate(claim, 2)
        await silence(engine)

    async def handed_back(self) -> None:
        async with worker(self.broker, "leaver") as engine:
            [claim] = await engine.claim()
            await engine.generate(claim, 2)

    async def reclaimed(self) -> None:
        engine, claim = await self._mortal("dead")
        await engine.generate(claim, 2)
        await self._kill(engine)

    async def suspected(self) -> None:
        for name in "ab":
            await self._poison(name)

    async def run_alone(self) -> None:
        await self.suspected()
        await self.claimed()
        assert self.owner is not None
        assert self.owner[1].isolated

    async def condemned(self) -> None:
        for name in "abcd":
            await self._poison(name)

    async def _poison(self, name: str) -> None:
        engine, claim = await self._mortal(name)
        await engine.session.mark(running=[claim.request_id])
        await self._kill(engine)

    async def _mortal(self, name: str) -> tuple[Worker, Claim]:
        session = EngineSession(self.broker, model=MODEL, engine_id=name, on_lost=lambda _: None)
        await session.__aenter__()
        self.stack.push_async_callback(silence, Worker(session))
        engine = Worker(session)
        await session.lease.beat()
        await pass_control_time(self.broker)  # it counts while an engine lives
        [claim] = await engine.claim()
        return engine, claim

    async def _kill(self, engine: Worker) -> None:
        await silence(engine)
        await expire_engine(self.broker, engine.session.engine_id)


STATES: dict[str, Callable[[Stage], Awaitable[None]]] = {
    name: getattr(Stage, name)
    for name in (
        "queued",
        "claimed",
        "running",
        "orphaned",
        "handed_back",
        "reclaimed",
        "suspected",
        "run_alone",
        "condemned",
    )
}


@pytest.fixture
async def gateway(broker: Broker) -> AsyncIterator[GatewaySession]:
    async with GatewaySession(broker) as gateway:
        yield gateway


async def is_finished(broker: Broker, request: RequestSpec) -> bool:
    return (await broker.view(request.request_id, TENANT)).state == REQUEST_STATE_FINISHED


HOW = ("cancel", "deadline", "abandonment")


@pytest.mark.parametrize(
    ("state", "how"),
    [
        pytest.param(state, how, marks=[] if row % len(HOW) == column else [pytest.mark.slow])
        for row, state in enumerate(STATES)
        for column, how in enumerate(HOW)
    ],
)
async def test_it_ends_once_and_leaves_nothing(
    broker: Broker, gateway: GatewaySession, redis_server: Place, state: str, how: str
) -> None:
    request = spec(deadline_ms=0 if how != "deadline" else 3_600_000, grace_ms=3_600_000)
    await gateway.accept(request)
    async with AsyncExitStack() as stack:
        stage = Stage(broker, stack)
        await STATES[state](stage)
        expected = FINISH_REASON_CANCELLED
        if how == "cancel":
            assert await broker.cancel(request.request_id, TENANT) == expected
        else:
            expected = FINISH_REASON_DEADLINE if how == "deadline" else expected
            due = PREFIX + ("deadlines" if how == "deadline" else "graces")

            async def is_over() -> bool:
                """Again and again: after a hole in the sweeps of a busy machine graces start anew, in full."""
                await broker.connection.execute("ZADD", due, "XX" if how == "deadline" else "LT", 1, request.request_id)
                return await is_finished(broker, request)

            await eventually(is_over)
            if how == "abandonment":  # the last look may have come after the end
                await broker.connection.execute("ZREM", due, request.request_id)
        entries = await read_all(gateway, request.request_id)
        view = await broker.view(request.request_id, TENANT)
        assert (view.finish_reason, entries[-1].end.reason) == (expected, expected)
        assert [entry.HasField("end") for entry in entries] == [False] * (len(entries) - 1) + [True]
        assert view.usage.completion_tokens == len(numbers(entries)) == entries[-1].end.usage.completion_tokens
        if stage.owner is not None:
            engine, claim = stage.owner
            late = await engine.append(claim, view.next_index, tokens([7], view.digest))
            assert late.kind is AppendKind.ENDED
        for key in LEFTOVERS:
            assert not await broker.connection.execute("EXISTS", PREFIX + key), key
        left = find_keys(redis_server, PREFIX + "queue:*")
        assert [await broker.connection.execute("XLEN", key) for key in left] == [0] * len(left)
        again = await broker.cancel(request.request_id, TENANT)
        assert again == expected, "later calls change nothing"
    assert await broker.quarantined(MODEL) == []


@pytest.mark.parametrize("state", ["queued", "claimed", "handed_back"])
async def test_only_what_no_engine_has_claimed_counts_as_unclaimed(
    broker: Broker, gateway: GatewaySession, state: str
) -> None:
    request, late = spec(grace_ms=3_600_000), spec(deadline_ms=3_600_000, grace_ms=3_600_000)
    await gateway.accept(request)
    where = await broker.directory.locate(request.request_id)
    async with AsyncExitStack() as stack:
        await STATES[state](Stage(broker, stack))

        async def end(ended: RequestSpec, least_age_ms: int) -> FinishReason | None:
            return await broker.end_request(
                where, ended.request_id, "deadline", condition="unclaimed", error="x\0y", least_age_ms=least_age_ms
            )

        assert await end(request, 3_600_000) is None
        expected = FINISH_REASON_DEADLINE if state == "queued" else None
        assert await end(request, 0) == expected
        if expected is not None:
            assert (await read_all(gateway, request.request_id))[-1].end.error.code == "x"
            await gateway.accept(late)
            assert await end(late, 0) is None


# -- As many partitions as the option takes: beats and sweeps in parts, and models that nobody uses at rest.


MANY = MAX_PARTITIONS


async def test_more_partitions_than_the_option_takes_are_refused(broker: Broker) -> None:
    with pytest.raises(ValueError, match="partitions: expected 1 to 1024, got 1025"):
        await broker.publish_model(card("other"), partitions=MANY + 1)


async def test_deadlines_and_reclaim_with_all_partitions(redis_url: str) -> None:
    settings = replace(CALM, heartbeat_ms=300, sweep_ms=300)  # as shipped
    async with await Broker.connect(redis_url, settings) as broker:
        await broker.publish_model(card(), partitions=MANY)
        async with GatewaySession(broker) as gateway, worker(broker):
            late, orphan = spec(partition=MANY - 1, deadline_ms=50), spec(partition=MANY // 2)
            await gateway.accept(late)
            await gateway.accept(orphan)
            where = Partition(MODEL, MANY // 2)
            async with worker(broker, "dies") as dead:
                [claim] = await dead.session.claimer.claim_from(where, 1, 10**6)
                await dead.session.lease.stop()
                dead.session.held.drop([claim.request_id])
                await broker.connection.execute("ZADD", f"{where.prefix}leases", "XX", 1, dead.session.engine_id)

                async def is_reclaimed() -> bool:
                    return (await broker.view(orphan.request_id, TENANT)).attempts == 1 and bool(
                        await broker.connection.execute("XLEN", f"{where.prefix}queue:resume")
                    )

                await eventually(is_reclaimed)
            view = await broker.view(late.request_id, TENANT)
            assert (view.state, view.finish_reason) == (REQUEST_STATE_FINISHED, FINISH_REASON_DEADLINE)


async def test_a_round_goes_on_behind_what_failed(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that is too slow for a whole round: it was thrown away, and the last partitions were never swept."""
    async with await Broker.connect(redis_url, replace(CALM, heartbeat_ms=100, sweep_ms=100)) as broker:
        await broker.publish_model(card(), partitions=MANY)
        run_each, turns = broker.connection.run_each, 0

        async def two_in_three(calls: Sequence[Call], limit_s: float | None = None) -> list[Any]:
            nonlocal turns
            sweeps = [call for call in calls if call.script is scripts.SWEEP]
            turns += bool(sweeps)
            num_partitions = sum(1 + len(call.arguments) - (scripts.SWEEP.num_arguments or 0) for call in sweeps)
            if num_partitions > 256 or (sweeps and turns % 3 == 0):
                raise Unavailable("no answer within 0.2 s")
            return await run_each(calls, limit_s)

        monkeypatch.setattr(broker.connection, "run_each", two_in_three)
        async with GatewaySession(broker) as gateway:
            requests = [spec(partition=number, deadline_ms=1) for number in (0, MANY // 3, MANY // 2, MANY - 1)]
            for request in requests:
                await gateway.accept(request)

            async def are_over() -> bool:
                views = [await once_there(partial(broker.view, each.request_id, TENANT)) for each in requests]
                return all(view.state == REQUEST_STATE_FINISHED for view in views)

            await eventually(are_over)


async def test_a_model_without_engines_and_requests_rests(broker: Broker, redis_server: Place) -> None:
    """Until it gets a request, here or at a gateway that has died since."""

    async def swept(partition: Partition) -> int:
        return int(await broker.connection.execute("HGET", f"{partition.prefix}meta", "swept") or 0)

    async def is_over(request_id: str) -> bool:
        return (await broker.view(request_id, TENANT)).state == REQUEST_STATE_FINISHED

    async with GatewaySession(broker) as gateway:
        sweeper, where = gateway.sweeper, Partition(MODEL, 0)
        await eventually(lambda: sweeper.is_resting(MODEL))
        last = await swept(where)
        await sweeper.sweep()
        await gateway.heartbeat.beat()
        assert await swept(where) == last
        here = spec(deadline_ms=1)
        await gateway.accept(here)
        await eventually(lambda: is_over(here.request_id))
        assert await swept(where) > last
        await eventually(lambda: sweeper.is_resting(MODEL))
        dies = GatewaySession(broker, "dies")
        there = spec(partition=1, deadline_ms=1)
        assert await dies.accept(there)  # it has no timers: it never sweeps
        await eventually(lambda: is_over(there.request_id))
    async with GatewaySession(broker) as gateway:
        await eventually(lambda: gateway.sweeper.is_resting(MODEL))
        async with worker(broker):
            await eventually(lambda: not gateway.sweeper.is_resting(MODEL))
            await gateway.sweeper.sweep()
            assert not gateway.sweeper.is_resting(MODEL), "an engine lives"


async def test_a_partition_that_can_not_be_swept_keeps_none_from_it(broker: Broker, redis_server: Place) -> None:
    """One run of the script takes many partitions; an error in one of them is its reply alone."""
    bad, good = Partition(MODEL, 0), Partition(MODEL, 1)
    await broker.connection.execute("SET", f"{bad.prefix}leases", "not a sorted set")
    arguments = 0, 10**9, 1000, 1000, 10, 1000, 1000, 0
    ask_all(redis_server, "SCRIPT", "FLUSH")
    with pytest.raises(Exception, match="WRONGTYPE"):
        await run_on_each(broker.connection, scripts.SWEEP, [bad, good], arguments)
    assert await broker.connection.execute("HEXISTS", f"{good.prefix}meta", "swept")
