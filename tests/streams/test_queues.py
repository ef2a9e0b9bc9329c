"""The state of the queues as gateways tell it: equal to what is in Redis, and a request's place in them."""

import asyncio
import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
from pagestream_streams import Broker, EngineSession, GatewaySession, QueueFull, Unavailable
from pagestream_streams.admin import QueueState, queue_states
from pagestream_streams.protocol import Partition
from support.protocol.token_streams import MODEL, STILL, TENANT, card, eventually, spec, worker

pytestmark = pytest.mark.served


def queue(state: QueueState, name: str) -> tuple[int, int]:
    """Requests and tokens of one queue; none where it isn't named."""
    return next(((each.requests, each.tokens) for each in state.waiting if each.queue == name), (0, 0))


async def test_an_unused_model_has_empty_partitions(broker: Broker) -> None:
    states = await queue_states(broker)
    assert list(states) == [MODEL]
    assert [state.partition for state in states[MODEL]] == [0, 1]
    for state in states[MODEL]:
        assert (state.running, state.drain_rate, queue(state, "resume")) == (0, 0.0, (0, 0))


async def test_what_waits_is_told_by_partition_and_class(broker: Broker) -> None:
    async with GatewaySession(broker) as gateway:
        for priority, size in ((0, 3), (0, 4), (2, 5)):
            await gateway.accept(spec(prompt=range(size), priority=priority))
        await gateway.accept(spec(partition=1, prompt=range(6)))
        first, second = (await queue_states(broker))[MODEL]
        assert (queue(first, "0"), queue(first, "2"), queue(second, "0")) == ((2, 7), (1, 5), (1, 6))
        assert first.running == second.running == 0

        async def has_aged() -> bool:
            return 0.02 < max(each.oldest_s for each in (await queue_states(broker))[MODEL][0].waiting) < 30

        await eventually(has_aged)


async def test_claims_move_from_waiting_to_running_and_set_the_rate(broker: Broker) -> None:
    async with GatewaySession(broker) as gateway, worker(broker) as engine:
        for size in (3, 4, 5):
            await gateway.accept(spec(prompt=range(size)))
        first, second = await engine.claim(2)
        assert first.waited_s >= second.waited_s >= 0
        state = (await queue_states(broker))[MODEL][0]
        assert (state.running, queue(state, "0")) == (2, (1, 5))
        assert 0 < state.drain_rate <= 7, "over less than a second it is taken as over one"
        await engine.generate(first, 2)
        await engine.session.hand_back([first.request_id])
        state = (await queue_states(broker))[MODEL][0]
        assert (state.running, queue(state, "0"), queue(state, "resume")) == (1, (1, 5), (1, 5))
        [again] = await engine.claim(1)
        assert (again.request_id, again.attempts) == (first.request_id, 2)
        assert again.waited_s < 30, "since it was put back, not since it was accepted"


async def test_what_no_living_engine_may_take_is_told_apart(broker: Broker) -> None:
    async with GatewaySession(broker) as gateway:
        await gateway.accept(spec(prompt=range(40)))
        [waiting] = [each for each in (await queue_states(broker))[MODEL][0].waiting if each.queue == "0"]
        assert (waiting.takeable_tokens, waiting.takeable_longest) == (40, 40), "no engine lives: any may come"
        async with EngineSession(broker, model=MODEL, engine_id="short", max_model_len=16, on_lost=print):
            await gateway.accept(spec(prompt=range(3)))
            state = (await queue_states(broker))[MODEL][0]
            [waiting] = [each for each in state.waiting if each.queue == "0"]
            assert (waiting.requests, waiting.tokens) == (2, 43)
            assert (waiting.takeable_tokens, waiting.takeable_longest) == (3, 3)
            assert waiting.takeable_oldest_s <= waiting.oldest_s


async def test_claims_are_counted_by_class_with_the_largest(broker: Broker) -> None:
    async with GatewaySession(broker) as gateway, worker(broker) as engine:
        for priority, size in ((0, 3), (2, 5), (2, 9)):
            await gateway.accept(spec(prompt=range(size), priority=priority))
        assert len(await engine.claim(3)) == 3
        state = (await queue_states(broker))[MODEL][0]
        rates = {each.queue: each.drain_rate for each in state.waiting}
        assert (rates["0"], rates["2"], state.drain_rate, state.drain_longest_rate) == (3, 14, 17, 9)


# -- The place of a queued request, and how long it may wait: over all partitions of its model.


PARTITIONS = 4
AGEING_MS = 50
QUIET = dataclasses.replace(STILL, steal_after_ms=0, ageing_ms=AGEING_MS)


def engine_of(broker: Broker) -> EngineSession:
    return EngineSession(broker, model=MODEL, on_lost=lambda _: None)


async def test_the_position_is_the_rank_in_the_order_of_all_partitions(redis_url: str) -> None:
    async with await Broker.connect(redis_url, QUIET) as broker, GatewaySession(broker) as gateway:
        await broker.publish_model(card(), partitions=PARTITIONS)
        async with engine_of(broker) as engine:
            begun = [spec(partition=number) for number in (2, 1)]
            for request in begun:
                await gateway.accept(request)
            assert len(await engine.claim(max_requests=2, max_prompt_tokens=100)) == 2
            waiting = [spec(partition=number % 3, priority=number % 2) for number in range(40)]
            for request in waiting:
                await gateway.accept(request)
            for request in begun:
                await engine.hand_back([request.request_id])
        keys = {}
        for request in [*begun, *waiting]:
            where = await broker.directory.locate(request.request_id)
            entry, queue = await broker.connection.execute("HMGET", where.request(request.request_id), "entry", "queue")
            ms, _, number = entry.decode().partition("-")
            virtual = int(ms) + (request.priority * AGEING_MS if queue.isdigit() else -(10**13))
            keys[request.request_id] = virtual, int(number)
        for request_id, key in keys.items():
            view = await broker.view(request_id, TENANT)
            assert view.queue_position == sum(other < key for other in keys.values())
            assert view.expected_wait_ms is None, "no engine lives"


async def test_the_expected_wait_is_what_goes_before_by_the_drain_rate(redis_url: str) -> None:
    async with (
        await Broker.connect(redis_url, QUIET) as broker,
        GatewaySession(broker) as gateway,
    ):
        await broker.publish_model(card(), partitions=PARTITIONS)
        async with engine_of(broker) as engine:
            first, *others, last = [spec(partition=number % 3, prompt=range(50)) for number in range(11)]
            for request in (first, *others, last):
                await gateway.accept(request)
                await asyncio.sleep(0.002)  # of those of the same millisecond none goes before
            assert (await broker.view(last.request_id, TENANT)).expected_wait_ms is None, "nothing has drained yet"
            [claim] = await engine.claim(max_requests=1, max_prompt_tokens=50)
            assert claim.request_id == first.request_id

            async def is_first_away() -> bool:  # places are read from Redis once every few milliseconds
                return (await broker.view(last.request_id, TENANT)).queue_position == len(others)

            await eventually(is_first_away)
            wait_ms = (await broker.view(last.request_id, TENANT)).expected_wait_ms
            # 50 tokens were claimed in the drain window, which counts as one second at least and ends after 20.
            assert wait_ms is not None
            assert len(others) * 1000 <= wait_ms <= len(others) * 20_000
            assert (await broker.view(others[0].request_id, TENANT)).expected_wait_ms == 0

        async def is_unknown() -> bool:
            return (await broker.view(last.request_id, TENANT)).expected_wait_ms is None

        await eventually(is_unknown)  # its engine has left


async def test_a_drain_that_began_ahead_of_the_clock_begins_anew(redis_url: str) -> None:
    """As a clock that was set back by an hour leaves it: no rate, until claims are counted from now on."""
    narrow = dataclasses.replace(QUIET, max_queued_requests=1)
    where = Partition(MODEL, 0)
    async with await Broker.connect(redis_url, narrow) as broker, GatewaySession(broker) as gateway:
        await broker.publish_model(card(), partitions=1)
        async with engine_of(broker) as engine:
            await gateway.accept(spec())
            assert len(await engine.claim(max_requests=1, max_prompt_tokens=100)) == 1
            now, _ = await broker.connection.execute("TIME")
            ahead = "drain_from", (int(now) + 3600) * 1000, "drained", 10**6, "drained_tokens", 10**9
            await broker.connection.execute("HSET", f"{where.prefix}meta", *ahead)
            request = spec(prompt=range(50))
            await gateway.accept(request)
            with pytest.raises(QueueFull) as refused:
                await gateway.accept(spec())
            assert refused.value.retry_after_s == narrow.retry_after_max_s
            [state] = (await queue_states(broker))[MODEL]
            assert state.drain_rate == 0
            assert (await broker.view(request.request_id, TENANT)).expected_wait_ms is None

            async def is_claimed() -> bool:
                return bool(await engine.claim(max_requests=1, max_prompt_tokens=100))

            await eventually(is_claimed)
            [state] = (await queue_states(broker))[MODEL]
            assert 0 < state.drain_rate <= 50


async def test_a_request_is_read_without_its_place_where_the_queues_do_not_answer_in_time(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with await Broker.connect(redis_url, QUIET) as broker, GatewaySession(broker) as gateway:
        await broker.publish_model(card(), partitions=PARTITIONS)
        run_each = broker.connection.run_each

        async def silent(calls: Sequence[Any], limit_s: float | None = None) -> list[Any]:
            if limit_s == QUIET.beat_limit_s:
                raise Unavailable(f"no answer within {limit_s} s")
            return await run_each(calls, limit_s)

        with monkeypatch.context() as patch:
            patch.setattr(broker.connection, "run_each", silent)
            request = spec()
            await gateway.accept(request)
            view = await broker.view(request.request_id, TENANT)
            assert (view.queue_position, view.expected_wait_ms) == (None, None)
