"""The engines' policy decides over the queue and two engines: see docs/design/queueing.md."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from pagestream.v1.inference_pb2 import REQUEST_STATE_FINISHED, TokenIds
from pagestream.v1.inference_pb2 import SamplingParams as SamplingMessage
from pagestream.v1.records_pb2 import RequestSpec
from pagestream_streams import Broker, GatewaySession
from pagestream_streams.admin import queue_states
from support.engines.arithmetic_worker import MODEL, SlowRunner, expected, running_worker, tokens
from support.processes.waiting import LIMIT_S
from support.protocol.token_streams import eventually

pytestmark = pytest.mark.served

NUM_ENGINES = 2
NUM_TOKENS = 20


async def accepted(gateway: GatewaySession, prompt: list[int], tenant: str) -> RequestSpec:
    spec = RequestSpec(
        request_id=await gateway.place(MODEL, prompt, tenant),
        model=MODEL,
        tenant=tenant,
        prompts=[TokenIds(ids=prompt)],
        sampling=SamplingMessage(seed=1, ignore_eos=True, max_tokens=NUM_TOKENS),
        disconnect_grace_ms=60_000,
    )
    await gateway.accept(spec)
    return spec


async def answer(gateway: GatewaySession, spec: RequestSpec) -> list[int]:
    async with asyncio.timeout(LIMIT_S):
        return tokens([e async for batch in gateway.read(spec.request_id, tenant=spec.tenant) for e in batch])


async def test_gateways_expect_what_engines_have_seen(redis_url: str, tmp_path: Path) -> None:
    """Whatever the policy, and the queue counts it while a request waits."""
    async with AsyncExitStack() as stack:
        broker = await stack.enter_async_context(await Broker.connect(redis_url))
        gateway = await stack.enter_async_context(GatewaySession(broker))
        async with running_worker(broker, tmp_path / "0") as engine:
            done = [await accepted(gateway, [3, number, 5], "a") for number in range(3)]
            await asyncio.gather(*(answer(gateway, spec) for spec in done))
            lengths = gateway.acceptor.lengths
            await eventually(lambda: lengths.expected(MODEL, 3, "a", 1000) == NUM_TOKENS)
            await engine.end()
        waiting = await accepted(gateway, [3, 3, 3], "a")
        assert await expected_outputs(broker) == NUM_TOKENS
        await broker.cancel(waiting.request_id, "a")
        assert await expected_outputs(broker) == 0


async def expected_outputs(broker: Broker) -> int:
    states = (await queue_states(broker))[MODEL]
    return sum(waiting.takeable_output_tokens for state in states for waiting in state.waiting)


@pytest.mark.parametrize("policy", ["shortest_first", "fair"])
async def test_a_small_request_of_another_tenant_passes_a_flood_in_the_queue(
    redis_url: str, tmp_path: Path, policy: str
) -> None:
    """Each engine has one seat; the flood was there first, with prompts of 200 tokens."""
    flood, single = [[3, number] * 100 for number in range(12)], [7, 7]
    async with AsyncExitStack() as stack:
        broker = await stack.enter_async_context(await Broker.connect(redis_url))
        gateway = await stack.enter_async_context(GatewaySession(broker))
        engines = [
            await stack.enter_async_context(
                running_worker(broker, tmp_path / str(number), SlowRunner, max_num_seqs=1, scheduling_policy=policy)
            )
            for number in range(NUM_ENGINES)
        ]
        waiting = [await accepted(gateway, prompt, "flood") for prompt in flood]
        await eventually(lambda: sum(int(each.worker.load()["running"]) for each in engines) == NUM_ENGINES)
        late = await accepted(gateway, single, "single")
        assert await answer(gateway, late) == expected(single, NUM_TOKENS)
        views = [await broker.view(spec.request_id, spec.tenant) for spec in waiting]
        num_before = sum(view.state == REQUEST_STATE_FINISHED for view in views)
        # Those that ran, and those of the flood that were at most one step of prefill ahead or one turn before.
        assert num_before <= 3 * NUM_ENGINES
        answers = await asyncio.gather(*(answer(gateway, spec) for spec in waiting))
        assert answers == [expected(prompt, NUM_TOKENS) for prompt in flood]
        for each in engines:
            await each.end()
