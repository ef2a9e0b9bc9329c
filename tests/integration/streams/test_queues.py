"""The queue states that gateways report equal what is in Redis."""

from pagestream_streams import Broker, EngineSession, GatewaySession
from pagestream_streams.admin.queues import QueueState, queue_states
from support.protocol.token_streams import MODEL, eventually, spec, worker


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
