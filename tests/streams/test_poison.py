"""Poison is isolated: what counts as a death, when and where a request runs alone, and when it is quarantined."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from pagestream.v1.inference_pb2 import FINISH_REASON_ERROR, FINISH_REASON_STOP, REQUEST_STATE_QUEUED
from pagestream.v1.records_pb2 import RequestSpec
from pagestream_streams import (
    Broker,
    Claim,
    EngineSession,
    GatewaySession,
    KnownPoison,
    RequestNotFound,
    Unavailable,
    expire_engine,
    scripts,
)
from pagestream_streams.connection import Call
from pagestream_streams.protocol import ClaimedLog, Partition
from support.processes.waiting import LIMIT_S
from support.protocol.token_streams import (
    CALM,
    MODEL,
    TENANT,
    Worker,
    card,
    eventually,
    lapse,
    numbers,
    pass_control_time,
    read_all,
    spec,
    worker,
)
from support.redis.topologies import Place, ask_all

pytestmark = pytest.mark.served


@pytest.fixture
async def gateway(broker: Broker) -> AsyncIterator[GatewaySession]:
    async with GatewaySession(broker) as gateway:
        yield gateway


@asynccontextmanager
async def mortal(broker: Broker, name: str) -> AsyncIterator[Worker]:
    """An engine whose tasks end without a word to Redis: the block's end is its death."""
    lost: list[str] = []
    session = EngineSession(broker, model=MODEL, engine_id=name, on_lost=lost.extend)
    await session.__aenter__()
    engine = Worker(session, lost)
    try:
        yield engine
    finally:
        await silence(engine)


async def silence(engine: Worker) -> None:
    for task in (engine.session.lease, engine.session.sweeper, engine.session.subscription):
        await task.stop()
    engine.session.held.drop(list(engine.session.held))


async def die(broker: Broker, engine: Worker) -> None:
    """It is killed, and its supervisor saw it."""
    await silence(engine)
    await expire_engine(broker, engine.session.engine_id)


async def claim_and_run(engine: Worker) -> Claim:
    [claim] = await engine.claim()
    await engine.session.mark(running=[claim.request_id])
    return claim


async def kill_with(broker: Broker, name: str) -> Claim:
    """An engine claims one request, computes it, and is dead. Time has passed since the last one died."""
    async with mortal(broker, name) as engine:
        await engine.session.lease.beat()
        await pass_control_time(broker)
        claim = await claim_and_run(engine)
        await die(broker, engine)
    return claim


async def is_suspect(broker: Broker, request_id: str) -> bool:
    where = await broker.directory.locate(request_id)
    score = await broker.connection.execute("ZSCORE", where.prefix + "suspects", request_id)
    return score is not None


async def accepted(gateway: GatewaySession, **fields: int) -> RequestSpec:
    request = spec(**fields)  # type: ignore[arg-type]
    await gateway.accept(request)
    return request


async def deaths(broker: Broker, request_id: str) -> list[str]:
    where = await broker.directory.locate(request_id)
    found = await broker.connection.execute("HGET", where.request(request_id), "died_on")
    return [] if found is None else found.decode().split()


class TestWhatCounts:
    async def test_a_death_in_the_running_step_at_the_same_index_twice(
        self, broker: Broker, gateway: GatewaySession
    ) -> None:
        request = await accepted(gateway)
        await kill_with(broker, "a")
        assert not await is_suspect(broker, request.request_id)
        await kill_with(broker, "b")
        assert await is_suspect(broker, request.request_id)

    async def test_one_death_of_a_step_that_stalls_for_those_that_are_new_in_it(
        self, broker: Broker, gateway: GatewaySession
    ) -> None:
        new, old = await accepted(gateway), await accepted(gateway)
        async with mortal(broker, "a") as engine:
            claimed = {claim.request_id for claim in await engine.claim(2)}
            assert claimed == {new.request_id, old.request_id}
            await engine.session.mark(running=[old.request_id], stalled=[new.request_id])
            await die(broker, engine)
        assert [await is_suspect(broker, each.request_id) for each in (new, old)] == [True, False]
        assert await deaths(broker, new.request_id) == await deaths(broker, old.request_id)

    async def test_an_engine_that_stalled_and_lived_takes_its_suspicion_back(
        self, broker: Broker, gateway: GatewaySession
    ) -> None:
        request = await accepted(gateway)
        async with worker(broker, "a") as engine:
            [claim] = await engine.claim()
            await engine.session.mark(stalled=[claim.request_id])
            await engine.session.lease.stop()
            await lapse(broker, engine.session)
            await eventually(lambda: is_suspect(broker, request.request_id))
            engine.session.lease.start()
            await eventually(lambda: not_suspect(broker, request))

    async def test_a_lease_that_lapsed_is_a_death(self, broker: Broker, gateway: GatewaySession) -> None:
        request = await accepted(gateway)
        async with mortal(broker, "a") as engine:
            await claim_and_run(engine)
        await lapse(broker, engine.session)
        await eventually(lambda: queued_again(broker, request))
        assert len(await deaths(broker, request.request_id)) == 1

    async def test_what_only_waited_in_the_engine_is_not_suspected(
        self, broker: Broker, gateway: GatewaySession
    ) -> None:
        request = await accepted(gateway)
        for name in ("a", "b", "c"):
            async with mortal(broker, name) as engine:
                await engine.claim()
                await die(broker, engine)
        assert await deaths(broker, request.request_id) == []

    async def test_what_left_the_step_to_wait_is_not_suspected(self, broker: Broker, gateway: GatewaySession) -> None:
        request = await accepted(gateway)
        async with mortal(broker, "a") as engine:
            claim = await claim_and_run(engine)
            await engine.generate(claim, 2)
            await engine.session.mark(waiting=[request.request_id])
            await die(broker, engine)
        assert await deaths(broker, request.request_id) == []

    async def test_what_was_appended_to_was_in_the_step(self, broker: Broker, gateway: GatewaySession) -> None:
        request = await accepted(gateway)
        async with mortal(broker, "a") as engine:
            [claim] = await engine.claim()
            await engine.generate(claim, 2)
            await die(broker, engine)
        assert len(await deaths(broker, request.request_id)) == 1

    async def test_an_appended_token_resets_the_count(self, broker: Broker, gateway: GatewaySession) -> None:
        request = await accepted(gateway)
        for length, name in enumerate("abcd", start=1):
            async with mortal(broker, name) as engine:
                claim = await claim_and_run(engine)
                assert not claim.isolated
                await engine.generate(claim, length)
                await die(broker, engine)
            assert len(await deaths(broker, request.request_id)) == 1
        assert not await is_suspect(broker, request.request_id)

    async def test_stops_never_count(self, broker: Broker, gateway: GatewaySession) -> None:
        request = await accepted(gateway)
        for name in "abc":
            async with worker(broker, name) as engine:
                await claim_and_run(engine)
        assert await deaths(broker, request.request_id) == []
        assert (await broker.view(request.request_id, TENANT)).state == REQUEST_STATE_QUEUED

    async def test_an_engine_that_broke_in_its_step_counts(self, broker: Broker, gateway: GatewaySession) -> None:
        request = await accepted(gateway)
        for name in "ab":
            async with worker(broker, name) as engine:
                await claim_and_run(engine)
                await engine.session.hand_back([request.request_id], failed=True)
        assert await is_suspect(broker, request.request_id)

    async def test_a_partition_is_taken_back_when_the_engine_returns(
        self, broker: Broker, gateway: GatewaySession
    ) -> None:
        """Cut off for longer than its lease, then there again by its boot nonce."""
        request = await accepted(gateway)
        await kill_with(broker, "a")
        async with worker(broker, "b") as cut_off:
            await claim_and_run(cut_off)
            await cut_off.session.lease.stop()
            await lapse(broker, cut_off.session)
            await eventually(lambda: is_suspect(broker, request.request_id))
            cut_off.session.lease.start()
            await eventually(lambda: not_suspect(broker, request))
            assert len(await deaths(broker, request.request_id)) == 1
            await eventually(lambda: cut_off.lost == [request.request_id])
        async with worker(broker, "c") as engine:
            assert not (await claim_and_run(engine)).isolated


async def knows_of_suspects(session: EngineSession) -> bool:
    return bool(session.assignment.with_suspects)


async def not_suspect(broker: Broker, request: RequestSpec) -> bool:
    return not await is_suspect(broker, request.request_id)


async def queued_again(broker: Broker, request: RequestSpec) -> bool:
    view = await broker.view(request.request_id, TENANT)
    return view.state == REQUEST_STATE_QUEUED and view.attempts > 0


class TestAlone:
    async def test_only_an_engine_that_holds_nothing_gets_it_and_then_nothing_else(
        self, broker: Broker, gateway: GatewaySession
    ) -> None:
        suspect = await accepted(gateway)
        for name in "ab":
            await kill_with(broker, name)
        first = await accepted(gateway, partition=1)
        async with worker(broker, "busy") as busy, AsyncExitStack() as stack:
            await busy.session.lease.stop()
            where = await broker.directory.locate(first.request_id)
            await eventually(lambda: holds_one_from(busy.session, where))
            assert await busy.session.claim(max_requests=9, max_prompt_tokens=100) == []
            idle = await stack.enter_async_context(worker(broker, "idle"))
            others = [await accepted(gateway, partition=number % 2) for number in range(4)]
            [claim] = await idle.claim()
            assert (claim.request_id, claim.isolated) == (suspect.request_id, True)
            assert await idle.session.claim(max_requests=9, max_prompt_tokens=100) == []
            assert len(await busy.claim(2)) == 2, "the others go on"
            digest = await idle.generate(claim, 1)
            assert len(await idle.claim(2)) == 2, "it has passed: the engine takes others again"
            rest = dataclasses.replace(claim, next_index=1, digest=digest)
            await idle.generate(rest, 4, finish=True)
        assert numbers(await read_all(gateway, suspect.request_id)) == [100, 101, 102, 103]
        assert await broker.quarantined(MODEL) == []
        assert len(others) == 4

    async def test_a_busy_engine_is_chosen_to_hand_everything_back(
        self, broker: Broker, gateway: GatewaySession
    ) -> None:
        quick = dataclasses.replace(CALM, alone_after_ms=50)
        suspect = await accepted(gateway)
        for name in "ab":
            await kill_with(broker, name)
        wanted = asyncio.Event()
        async with await Broker.connect(broker.connection.url, quick) as other:
            session = EngineSession(other, model=MODEL, engine_id="busy", on_lost=ignore, on_hand_back_all=wanted.set)
            async with session:
                busy = Worker(session)
                long = await accepted(gateway, partition=1)
                where = await broker.directory.locate(long.request_id)
                await eventually(lambda: holds_one_from(session, where))
                async with asyncio.timeout(LIMIT_S):
                    await wanted.wait()
                    await session.hand_back([long.request_id])
                    [claim] = await busy.claim()
                    while not claim.isolated:  # on a busy machine it may not have learned yet where the suspect is
                        await session.hand_back([claim.request_id])
                        [claim] = await busy.claim()
                assert claim.request_id == suspect.request_id
                await busy.generate(claim, 1, finish=True)
                [claim] = await busy.claim()
                assert claim.request_id == long.request_id

    async def test_the_next_suspect_follows_one_that_has_passed(self, broker: Broker, gateway: GatewaySession) -> None:
        """Not only when the first has ended: a crowd of suspects takes a prefill each, no more."""
        suspects = {(await accepted(gateway)).request_id for _ in range(2)}
        for name in "ab":
            async with mortal(broker, name) as engine:
                claims = await engine.claim(2)
                await engine.session.mark(running=[claim.request_id for claim in claims])
                await die(broker, engine)
        wanted = asyncio.Event()
        session = EngineSession(broker, model=MODEL, engine_id="trial", on_lost=ignore, on_hand_back_all=wanted.set)
        async with session:
            trial = Worker(session)
            [first] = await trial.claim()
            assert first.isolated
            await eventually(lambda: knows_of_suspects(session))
            await trial.generate(first, 1)
            assert wanted.is_set()
            await session.hand_back([first.request_id])
            wanted.clear()
            [second] = await trial.claim()
            assert (second.isolated, {first.request_id, second.request_id}) == (True, suspects)
            await session.lease.stop()
            await session.lease.beat()
            await trial.generate(second, 1)
            assert not wanted.is_set(), "none waits behind it"
            [again] = await trial.claim()
            assert (again.request_id, again.isolated, again.next_index) == (first.request_id, False, 1)

    async def test_what_is_lost_on_the_way_stays_a_suspect(self, broker: Broker, gateway: GatewaySession) -> None:
        suspect = await accepted(gateway)
        for name in "ab":
            await kill_with(broker, name)
        async with worker(broker, "c") as engine:
            await engine.claim()
            await engine.session.hand_back([suspect.request_id])
            assert await is_suspect(broker, suspect.request_id)
            [claim] = await engine.claim()
            assert claim.isolated

    async def test_it_can_be_cancelled_while_it_waits(self, broker: Broker, gateway: GatewaySession) -> None:
        suspect = await accepted(gateway)
        for name in "ab":
            await kill_with(broker, name)
        assert (await broker.view(suspect.request_id, TENANT)).queue_position == 0
        await broker.cancel(suspect.request_id, TENANT)
        assert not await is_suspect(broker, suspect.request_id)
        async with worker(broker, "c") as engine:
            assert await engine.session.claim(max_requests=1, max_prompt_tokens=100) == []


async def holds_one_from(session: EngineSession, where: Partition) -> bool:
    """A claim past the doorbell and the suspects of other partitions; entries of others are left for a while."""
    session.claimer.hold(await session.claimer.claim_from(where, 1, 100))
    return len(session.held) == 1


def ignore(_: object) -> None:
    """Nothing is lost here that the test does not know of."""


class TestQuarantine:
    async def poisoned(self, broker: Broker, gateway: GatewaySession) -> RequestSpec:
        """A request that has one token, and kills each engine that computes the next."""
        request = await accepted(gateway)
        async with worker(broker, "first") as engine:
            [claim] = await engine.claim()
            await engine.generate(claim, 1)
        for name in ("a", "b"):
            assert not (await kill_with(broker, name)).isolated
        for name in ("c", "d"):
            assert (await kill_with(broker, name)).isolated
        return request

    async def test_after_two_deaths_with_it_alone(self, broker: Broker, gateway: GatewaySession) -> None:
        request = await self.poisoned(broker, gateway)
        neighbour = await accepted(gateway)
        async with worker(broker, "spare") as spare:
            reading = asyncio.create_task(read_all(gateway, request.request_id))
            [claim] = await spare.claim()
            assert claim.request_id == neighbour.request_id
            assert not reading.done()
            await pass_control_time(broker)
            entries = await reading
            await spare.generate(claim, 2, finish=True)
        assert numbers(entries) == [100]
        end = entries[-1].end
        assert (end.reason, end.error.code) == (FINISH_REASON_ERROR, "quarantined")
        assert "4 engines died while they computed entry 1" in end.error.message
        [dead] = await broker.quarantined(MODEL)
        assert dead == await broker.quarantined_request(request.request_id)
        assert (dead.request_id, dead.tenant, dead.next_index, dead.attempts) == (request.request_id, TENANT, 1, 5)
        assert [engine.partition(":")[0] for engine in dead.engines] == ["a", "b", "c", "d"]
        assert (dead.reason, dead.spec, dead.requeued_as) == (end.error.message, request, None)

    async def test_requeued_under_a_new_id_from_where_it_stood(self, broker: Broker, gateway: GatewaySession) -> None:
        request = await self.poisoned(broker, gateway)
        async with worker(broker, "fixed") as engine:
            await engine.session.lease.beat()
            await pass_control_time(broker)
            old = await read_all(gateway, request.request_id)
            new_id = await broker.requeue(request.request_id)
            assert await broker.requeue(request.request_id) == new_id != request.request_id
            [claim] = await engine.claim()
            assert (claim.request_id, claim.isolated, claim.next_index) == (new_id, True, 1)
            assert claim.log == ClaimedLog.of(old[:1])
            await engine.generate(claim, 3, finish=True)
        assert numbers(await read_all(gateway, new_id)) == [100, 101, 102]
        assert await read_all(gateway, request.request_id) == old, "its own log has one end and keeps it"
        assert (await broker.quarantined_request(request.request_id)).requeued_as == new_id
        assert (await broker.view(new_id, TENANT)).finish_reason == FINISH_REASON_STOP

    async def test_its_equals_are_refused_for_a_while_and_nothing_else(
        self, broker: Broker, gateway: GatewaySession
    ) -> None:
        request = await self.poisoned(broker, gateway)
        async with worker(broker, "spare") as spare:
            await spare.session.lease.beat()
            await pass_control_time(broker)
            await read_all(gateway, request.request_id)

        async def is_refused(again: RequestSpec) -> bool:
            try:
                await gateway.accept(again)
            except KnownPoison as error:
                return error.request_id == request.request_id
            return False

        equal = spec(priority=2, grace_ms=1)
        equal.sampling.seed = 8
        await eventually(lambda: is_refused(RequestSpec.FromString(equal.SerializeToString())))
        for other in (spec(n=2), spec(prompt=(1, 2, 4)), spec(tenant="another")):
            assert not await is_refused(other)
        assert not await gateway.accept(request), "the same request is joined, and gets its end"

    async def test_what_is_not_quarantined_is_not_found(self, broker: Broker, gateway: GatewaySession) -> None:
        request = await accepted(gateway)
        for ask in (broker.quarantined_request, broker.requeue):
            with pytest.raises(RequestNotFound):
                await ask(request.request_id)

    async def test_it_is_kept_for_longer_than_others(self, redis_url: str) -> None:
        brief = dataclasses.replace(CALM, retention_s=1)
        async with await Broker.connect(redis_url, brief) as broker:
            await broker.publish_model(card(), partitions=2)
            async with GatewaySession(broker) as gateway:
                request = await self.poisoned(broker, gateway)
                async with worker(broker, "spare") as spare:
                    await spare.session.lease.beat()
                    await pass_control_time(broker)
                    await read_all(gateway, request.request_id)
                where = await broker.directory.locate(request.request_id)
                for key in (where.request(request.request_id), where.log(request.request_id)):
                    assert await broker.connection.execute("PTTL", key) > 3600_000


class TestStorms:
    """Kills that are not the request's fault quarantine nothing."""

    async def run_at_last(self, broker: Broker, request: RequestSpec) -> None:
        async with worker(broker, "calm") as calm:
            await calm.session.lease.beat()
            await pass_control_time(broker)
            [claim] = await calm.claim()
            assert claim.isolated
            await calm.generate(claim, 2, finish=True)
        assert (await broker.view(request.request_id, TENANT)).finish_reason == FINISH_REASON_STOP

    async def test_a_death_of_an_engine_that_did_not_run_it_acquits(
        self, broker: Broker, gateway: GatewaySession
    ) -> None:
        request = await accepted(gateway)
        for name in "ab":
            await kill_with(broker, name)
        async with mortal(broker, "other") as other:
            for name in "cd":
                assert (await kill_with(broker, name)).isolated
            await die(broker, other)
        await self.run_at_last(broker, request)
        assert await broker.quarantined(MODEL) == []

    async def test_between_two_runs_alone_engines_run_without_it(self, broker: Broker, gateway: GatewaySession) -> None:
        await accepted(gateway)
        for name in "abc":
            await kill_with(broker, name)
        async with worker(broker, "d") as engine:
            for _ in range(3):
                await engine.session.lease.beat()
                assert await engine.session.claim(max_requests=1, max_prompt_tokens=100) == []
            await pass_control_time(broker)
            assert (await engine.claim())[0].isolated

    async def test_an_engine_that_dies_in_that_time_acquits(self, broker: Broker, gateway: GatewaySession) -> None:
        """One engine at a time: the storm kills it whether or not it runs the suspect."""
        request = await accepted(gateway)
        for name in "abc":
            await kill_with(broker, name)
        async with mortal(broker, "control") as control:
            assert await control.session.claim(max_requests=1, max_prompt_tokens=100) == []
            await die(broker, control)
        await kill_with(broker, "d")
        await self.run_at_last(broker, request)

    async def test_two_poisons_do_not_acquit_each_other(self, broker: Broker, gateway: GatewaySession) -> None:
        requests = [await accepted(gateway, partition=number) for number in (0, 1)]
        for name in "ab":
            async with mortal(broker, name) as engine:
                both = await engine.claim(len(requests))
                await engine.session.mark(running=[claim.request_id for claim in both])
                await die(broker, engine)
        rounds = [isolated async for isolated in self.rounds(broker, gateway, requests)]
        assert all(rounds)

    async def test_nor_do_those_that_kill_in_turns(self, broker: Broker, gateway: GatewaySession) -> None:
        """Each one's first deaths, with neighbours, acquit the other; those must not do so for ever."""
        requests = [await accepted(gateway, partition=number) for number in (0, 1)]
        for name in "abcd":
            await kill_with(broker, name)
        assert [isolated async for isolated in self.rounds(broker, gateway, requests)]

    async def rounds(
        self, broker: Broker, gateway: GatewaySession, requests: Sequence[RequestSpec]
    ) -> AsyncIterator[bool]:
        """Engines die in turns until all are quarantined; yields whether each died with a suspect alone."""
        ended = [asyncio.create_task(read_all(gateway, request.request_id)) for request in requests]
        for _ in range(40):
            async with mortal(broker, "next") as engine:
                await engine.session.lease.beat()
                await pass_control_time(broker)
                claims: list[Claim] = []
                async with asyncio.timeout(LIMIT_S):
                    while not claims and not all(task.done() for task in ended):
                        claims = await engine.session.claim(max_requests=1, max_prompt_tokens=100)
                        await asyncio.wait(ended, timeout=0.02)
                await engine.session.mark(running=[claim.request_id for claim in claims])
                await die(broker, engine)
            if all(task.done() for task in ended):
                break
            yield all(claim.isolated for claim in claims)
        assert [(await task)[-1].end.error.code for task in ended] == ["quarantined"] * len(requests)


# -- An engine is chosen to hand everything back for a suspect only where it takes the suspect then.


OLD, NEW = "0123456789abcdef", "fedcba9876543210"


@asynccontextmanager
async def still_engine(
    broker: Broker,
    name: str,
    fingerprint: str = "",
    on_hand_back_all: Callable[[], None] = lambda: None,
    *,
    max_model_len: int = 0,
) -> AsyncIterator[Worker]:
    """Its beats are the test's own."""
    session = EngineSession(
        broker,
        model=MODEL,
        engine_id=name,
        on_lost=lambda _: None,
        on_hand_back_all=on_hand_back_all,
        fingerprint=fingerprint,
        max_model_len=max_model_len,
    )
    async with session:
        await session.lease.stop()
        yield Worker(session)


async def accepted_room_for_suspects(gateway: GatewaySession, partition: int, prompt_tokens: int = 3) -> RequestSpec:
    request = spec(partition=partition, prompt=[1] * prompt_tokens)
    await gateway.accept(request)
    return request


async def make_suspect(broker: Broker, request: RequestSpec, *, num_tokens: int = 0, fingerprint: str = "") -> None:
    """Two engines die with it in their running step, and nothing else."""
    for name in "ab":
        async with still_engine(broker, name, fingerprint) as engine:
            [claim] = await engine.claim()
            assert claim.request_id == request.request_id
            await engine.generate(claim, num_tokens)
            await engine.session.mark(running=[claim.request_id])
            await expire_engine(broker, engine.session.engine_id)
    where = await broker.directory.locate(request.request_id)
    assert await broker.connection.execute("ZSCORE", where.prefix + "suspects", request.request_id) is not None


async def test_not_for_one_that_has_to_go_on_where_it_is_computed_alike(broker: Broker, redis_url: str) -> None:
    prompt = dataclasses.replace(CALM, alone_after_ms=0)
    async with GatewaySession(broker) as gateway, await Broker.connect(redis_url, prompt) as hasty:
        suspect = await accepted_room_for_suspects(gateway, 1)
        await make_suspect(broker, suspect, num_tokens=1, fingerprint=OLD)
        chosen: list[str] = []
        async with (
            still_engine(hasty, "new", NEW, lambda: chosen.append("new")) as new,
            still_engine(hasty, "old", OLD) as old,
        ):
            await accepted_room_for_suspects(gateway, 0)
            [mine] = await new.claim()
            assert mine.request_id != suspect.request_id
            await new.session.lease.beat()
            assert (chosen, new.session.assignment.with_suspects) == ([], set())
            await old.session.lease.beat()
            assert old.session.assignment.with_suspects == {1}
            [claim] = await old.claim()
            assert (claim.request_id, claim.isolated) == (suspect.request_id, True)


async def test_one_that_was_blocked_by_another_partition_takes_it_first(broker: Broker, redis_url: str) -> None:
    impatient = dataclasses.replace(CALM, alone_after_ms=0, ageing_ms=1)
    async with (
        GatewaySession(broker) as gateway,
        await Broker.connect(redis_url, impatient) as hasty,
        still_engine(hasty, "busy") as busy,
    ):
        suspect = await accepted_room_for_suspects(gateway, 1)
        await make_suspect(broker, suspect)
        large = [await accepted_room_for_suspects(gateway, 0, prompt_tokens=600) for _ in range(2)]
        [claim] = await busy.session.claimer.claim_from(Partition(MODEL, 0), 1, 1000)
        busy.session.claimer.hold([claim])
        assert claim.request_id == large[0].request_id
        await busy.session.lease.beat()

        async def is_blocked() -> bool:
            busy.session.doorbell.ring_all()
            assert await busy.session.claim(max_requests=1, max_prompt_tokens=400) == []
            return busy.session.claim_order.reserves(busy.session.assignment.own, 400)

        await eventually(is_blocked)
        assert busy.session.assignment.with_suspects == {1}
        await busy.session.hand_back([claim.request_id])
        [claim] = await busy.session.claim(max_requests=1, max_prompt_tokens=10**6)
        assert (claim.request_id, claim.isolated) == (suspect.request_id, True)


async def test_one_that_needs_a_long_context_is_left_to_an_engine_that_holds_it(broker: Broker) -> None:
    async with GatewaySession(broker) as gateway:
        suspect = await accepted_room_for_suspects(gateway, 0, prompt_tokens=100)
        await make_suspect(broker, suspect)
        async with (
            still_engine(broker, "short", max_model_len=100) as short,
            still_engine(broker, "long", max_model_len=101) as long,
        ):
            await short.session.lease.beat()
            assert short.session.assignment.with_suspects == set()
            assert await short.session.claim(max_requests=1, max_prompt_tokens=1000) == []
            await long.session.lease.beat()
            assert long.session.assignment.with_suspects == {0}
            [claim] = await long.claim()
            assert (claim.request_id, claim.isolated) == (suspect.request_id, True)


async def isolated(broker: Broker) -> list[dict[bytes, bytes]]:
    """What each partition knows of engines that run a suspect."""
    where = await broker.directory.all_partitions(MODEL)
    return [await broker.connection.execute("HGETALL", each.isolated) for each in where]


async def beaten_until_seen(engine: Worker) -> None:
    async def is_seen() -> bool:
        await engine.session.lease.beat()
        return engine.session.assignment.with_suspects == {0}

    await eventually(is_seen)


async def test_every_partition_knows_of_a_suspect_that_is_claimed_while_redis_is_full(
    broker: Broker, redis_server: Place
) -> None:
    async with GatewaySession(broker) as gateway:
        suspect = await accepted_room_for_suspects(gateway, 0)
        await make_suspect(broker, suspect)
        await accepted_room_for_suspects(gateway, 1)
        async with still_engine(broker, "engine") as engine:
            await beaten_until_seen(engine)
            ask_all(redis_server, "CONFIG", "SET", "maxmemory", 1)
            try:
                [claim] = await engine.session.claim(max_requests=4, max_prompt_tokens=1000)
                assert (claim.request_id, claim.isolated) == (suspect.request_id, True)
                assert await isolated(broker) == [{engine.session.engine_id.encode(): suspect.request_id.encode()}] * 2
                assert await engine.session.claim(max_requests=4, max_prompt_tokens=1000) == []
            finally:
                ask_all(redis_server, "CONFIG", "SET", "maxmemory", 0)


async def test_one_whose_isolation_is_not_known_everywhere_is_not_held_and_is_handed_back(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_many = broker.connection.run_many

    async def loses_the_last(calls: list[Call]) -> list[Any]:
        if calls[0].script is not scripts.ISOLATE or not calls[0].arguments[1]:
            return await run_many(calls)
        await run_many(calls[:-1])
        raise Unavailable("the connection was lost")

    async with GatewaySession(broker) as gateway:
        suspect = await accepted_room_for_suspects(gateway, 0)
        await make_suspect(broker, suspect)
        async with still_engine(broker, "engine") as engine:
            await beaten_until_seen(engine)
            with monkeypatch.context() as patch:
                patch.setattr(broker.connection, "run_many", loses_the_last)
                with pytest.raises(Unavailable):
                    await engine.session.claim(max_requests=4, max_prompt_tokens=1000)
            assert list(engine.session.held) == []
            engine.session.assignment.with_suspects.clear()
            assert await engine.session.claim(max_requests=4, max_prompt_tokens=1000) == []
            assert await isolated(broker) == [{}, {}]
            await beaten_until_seen(engine)
            [claim] = await engine.session.claim(max_requests=4, max_prompt_tokens=1000)
            assert (claim.request_id, claim.isolated) == (suspect.request_id, True)
            assert len((await isolated(broker))[1]) == 1
