"""As many partitions as the option takes: beats and sweeps in parts, and models that nobody uses at rest."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from pagestream.v1.inference_pb2 import FINISH_REASON_DEADLINE, REQUEST_STATE_FINISHED
from pagestream_streams import Broker, GatewaySession, Unavailable
from pagestream_streams.connection.connection import Call
from pagestream_streams.connection.partition_runs import run_on_each
from pagestream_streams.connection.scripts import SWEEP
from pagestream_streams.protocol import ids
from pagestream_streams.protocol.keys import Partition
from support.protocol.token_streams import FAST, MODEL, TENANT, card, eventually, once_there, spec, worker
from support.redis.topologies import Place, ask_all

MANY = ids.MAX_PARTITIONS


async def test_more_partitions_than_the_option_takes_are_refused(broker: Broker) -> None:
    with pytest.raises(ValueError, match="partitions: expected 1 to 1024, got 1025"):
        await broker.publish_model(card("other"), partitions=MANY + 1)


async def test_deadlines_and_reclaim_with_all_partitions(redis_url: str) -> None:
    settings = replace(FAST, lease_ms=1500, heartbeat_ms=300, sweep_ms=300, sweep_gap_ms=900)  # as shipped
    async with await Broker.connect(redis_url, settings) as broker:
        await broker.publish_model(card(), partitions=MANY)
        async with GatewaySession(broker) as gateway, worker(broker):
            late, orphan = spec(partition=MANY - 1, deadline_ms=50), spec(partition=MANY // 2)
            await gateway.accept(late)
            await gateway.accept(orphan)
            where = Partition(MODEL, MANY // 2)
            async with worker(broker, "dies") as dead:
                [claim] = await dead.session.claimer.claim_from(where, 1, 10**6)
                await dead.session.heartbeat.stop()
                dead.session.active_requests.drop([claim.request_id])

                async def is_reclaimed() -> bool:
                    return (await broker.view(orphan.request_id, TENANT)).attempts == 1 and bool(
                        await broker.connection.execute("XLEN", f"{where.prefix}queue:resume")
                    )

                await eventually(is_reclaimed)
            view = await broker.view(late.request_id, TENANT)
            assert (view.state, view.finish_reason) == (REQUEST_STATE_FINISHED, FINISH_REASON_DEADLINE)


async def test_a_round_goes_on_behind_what_failed(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that is too slow for a whole round: it was thrown away, and the last partitions were never swept."""
    async with await Broker.connect(redis_url, replace(FAST, heartbeat_ms=100, sweep_ms=100)) as broker:
        await broker.publish_model(card(), partitions=MANY)
        run_each, turns = broker.connection.run_each, 0

        async def two_in_three(calls: Sequence[Call], limit_s: float | None = None) -> list[Any]:
            nonlocal turns
            sweeps = [call for call in calls if call.script is SWEEP]
            turns += bool(sweeps)
            num_partitions = sum(1 + len(call.arguments) - (SWEEP.num_arguments or 0) for call in sweeps)
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
        assert not sweeper.is_resting(MODEL)
        await eventually(lambda: is_over(here.request_id))
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
        await run_on_each(broker.connection, SWEEP, [bad, good], arguments)
    assert await broker.connection.execute("HEXISTS", f"{good.prefix}meta", "swept")
