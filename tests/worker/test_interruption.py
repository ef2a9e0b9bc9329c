"""A request of class 0 on engines without a free seat: it takes one, and the interrupted goes on with equal tokens."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from pagestream.v1.inference_pb2 import REQUEST_STATE_FINISHED, TokenIds
from pagestream.v1.inference_pb2 import SamplingParams as SamplingMessage
from pagestream.v1.records_pb2 import RequestSpec
from pagestream_streams import Broker, GatewaySession
from support.engines.arithmetic_worker import MODEL, TENANT, SlowRunner, expected, read, running_worker, tokens
from support.protocol.token_streams import eventually

pytestmark = pytest.mark.served

NUM_SEATS = 2
NUM_LOW_TOKENS = 300
OPTIONS = {"max_num_seqs": NUM_SEATS, "scheduling_policy": "priority"}


async def accepted(gateway: GatewaySession, prompt: list[int], num_tokens: int, priority: int) -> RequestSpec:
    spec = RequestSpec(
        request_id=await gateway.place(MODEL, prompt, TENANT),
        model=MODEL,
        tenant=TENANT,
        priority=priority,
        prompts=[TokenIds(ids=prompt)],
        sampling=SamplingMessage(seed=1, ignore_eos=True, max_tokens=num_tokens),
        disconnect_grace_ms=60_000,
    )
    await gateway.accept(spec)
    return spec


@pytest.mark.parametrize("num_engines", [pytest.param(1, marks=pytest.mark.slow), 2])
async def test_the_first_class_takes_seats_from_the_lowest(redis_url: str, tmp_path: Path, num_engines: int) -> None:
    """All seats are taken and more of the lowest class wait; so many of class 0 come as there are seats."""
    num_seats = NUM_SEATS * num_engines
    async with AsyncExitStack() as stack:
        broker = await stack.enter_async_context(await Broker.connect(redis_url))
        gateway = await stack.enter_async_context(GatewaySession(broker))
        engines = [
            await stack.enter_async_context(running_worker(broker, tmp_path / str(number), SlowRunner, **OPTIONS))
            for number in range(num_engines)
        ]
        low = [await accepted(gateway, [3, number], NUM_LOW_TOKENS, 2) for number in range(num_seats + 2)]
        await eventually(lambda: sum(int(each.worker.load()["running"]) for each in engines) == num_seats)
        urgent = [await accepted(gateway, [7, number], 20, 0) for number in range(num_seats)]
        logs = await asyncio.gather(*(read(gateway, spec) for spec in urgent))
        assert [tokens(log) for log in logs] == [expected([7, number], 20) for number in range(num_seats)]
        views = [await broker.view(spec.request_id, spec.tenant) for spec in low]
        assert REQUEST_STATE_FINISHED not in {view.state for view in views}, "no seat became free by itself"
        logs = await asyncio.gather(*(read(gateway, spec) for spec in low))
        assert [tokens(log) for log in logs] == [expected([3, each], NUM_LOW_TOKENS) for each in range(num_seats + 2)]
        views = [await broker.view(spec.request_id, spec.tenant) for spec in low]
        assert {view.attempts for view in views} == {1}
        for each in engines:
            await each.end()
