"""A prompt that breaks its engine, which is started again each time: it is quarantined, and its neighbours lose nothing
but time. A prompt that kills the process is in tests/faults/test_poison_under_serve.py.
"""

import asyncio
import dataclasses
import signal
import sys
import textwrap
from pathlib import Path

import pytest
from pagestream.v1.inference_pb2 import FINISH_REASON_ERROR, FINISH_REASON_LENGTH, TokenIds
from pagestream.v1.inference_pb2 import SamplingParams as SamplingMessage
from pagestream.v1.records_pb2 import LogEntry, RequestSpec
from pagestream_engine import SamplingParams
from pagestream_streams import Broker, GatewaySession, StreamsSettings, expire_engine
from support.engines.arithmetic_model import ArithmeticFacts, undisturbed

pytestmark = pytest.mark.timeout(180)

MODEL = "arithmetic"
POISON = 13
NUM_TOKENS = 400
QUICK = StreamsSettings(
    lease_ms=1000,
    heartbeat_ms=100,
    sweep_ms=100,
    sweep_gap_ms=600,
    control_leases=2.0,
    storm_leases=10.0,
    alone_after_ms=100,
    directory_ttl_s=0.2,
)
ENGINE = """
    import asyncio, sys, time
    from pathlib import Path
    sys.path.insert(0, {support!r})
    from support.engines import arithmetic_worker as w
    from pagestream_streams import StreamsSettings

    class PoisonedRunner(w.ArithmeticRunner):
        def execute(self, plan):
            time.sleep(0.005)
            for new in plan.added:
                if new.token_ids[0] == {poison}:
                    raise RuntimeError("no such kernel")
            return super().execute(plan)

    async def main():
        async with await w.Broker.connect({url!r}, StreamsSettings(**{settings!r})) as broker:
            async with w.running_worker(broker, Path({folder!r}), PoisonedRunner) as running:
                print("ready", flush=True)
                await running.task

    asyncio.run(main())
"""


async def accepted(gateway: GatewaySession, prompt: list[int]) -> RequestSpec:
    spec = RequestSpec(
        request_id=await gateway.place(MODEL, prompt, "tenant"),
        model=MODEL,
        tenant="tenant",
        prompts=[TokenIds(ids=prompt)],
        sampling=SamplingMessage(seed=1, ignore_eos=True, max_tokens=NUM_TOKENS),
        disconnect_grace_ms=60_000,
    )
    await gateway.accept(spec)
    return spec


async def read(gateway: GatewaySession, spec: RequestSpec) -> list[LogEntry]:
    entries: list[LogEntry] = []
    async for batch in gateway.read(spec.request_id, tenant="tenant"):
        entries += batch
    return entries


async def supervise(broker: Broker, program: str, exits: list[int]) -> None:
    """What a supervisor does: starts the engine again, and says that the one before is dead."""
    while True:
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", program)
        try:
            exits.append(await process.wait())
        except asyncio.CancelledError:
            process.send_signal(signal.SIGKILL)
            await process.wait()
            raise
        await expire_engine(broker, "worker")


@pytest.mark.slow
async def test_poison_is_quarantined_and_its_neighbours_go_on(redis_url: str, tmp_path: Path) -> None:
    program = textwrap.dedent(ENGINE).format(
        support=str(Path(__file__).parents[2]),
        url=redis_url,
        folder=str(tmp_path),
        poison=POISON,
        settings=dataclasses.asdict(QUICK),
    )
    facts, exits = ArithmeticFacts(), list[int]()
    async with await Broker.connect(redis_url, QUICK) as broker, asyncio.timeout(150):
        supervisor = asyncio.create_task(supervise(broker, program, exits))
        try:
            while not await broker.models():  # noqa: ASYNC110 - another process publishes it
                await asyncio.sleep(0.05)
            async with GatewaySession(broker) as gateway:
                neighbours = [await accepted(gateway, [number, 5, 6]) for number in range(1, 4)]
                poison = await accepted(gateway, [POISON, 5, 6])
                logs = await asyncio.gather(*(read(gateway, spec) for spec in (poison, *neighbours)))
        finally:
            supervisor.cancel()
            await asyncio.gather(supervisor, return_exceptions=True)
        [dead] = await broker.quarantined(MODEL)
    end = logs[0][-1].end
    assert (end.reason, end.error.code) == (FINISH_REASON_ERROR, "quarantined")
    assert (dead.request_id, dead.next_index, len(dead.engines)) == (poison.request_id, 0, 4)
    # The first engine may die before it could say that the prompt is in its step.
    assert exits in ([1] * 4, [1] * 5)
    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
    for log, spec in zip(logs[1:], neighbours, strict=True):
        tokens = [entry.token_id for entry in log if entry.WhichOneof("body") == "token_id"]
        assert tokens == undisturbed(list(spec.prompts[0].ids), params, facts, 1000)
        assert log[-1].end.reason == FINISH_REASON_LENGTH
