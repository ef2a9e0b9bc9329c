"""What a claim costs, and how far its order is off, by the number of partitions and engines.

python tests/benchmarks/streams_claim.py [--partitions 4 256] [--engines 1 10] [--requests 1500]
"""

import argparse
import asyncio
import math
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from pagestream.v1.inference_pb2 import SamplingParams, TokenIds
from pagestream.v1.records_pb2 import ModelCard, RequestSpec
from pagestream_streams import Broker, EmbeddedRedis, EngineSession, GatewaySession
from pagestream_streams.protocol.keys import new_request_id

MODEL = "benchmark"
IDLE_S = 2.0
IDLE_PAUSE_S = 0.1  # as the worker's idle_poll_s


class Trips:
    """Counts the round trips of one connection."""

    def __init__(self, broker: Broker) -> None:
        self.count = 0
        topology: Any = broker.connection.topology
        for name in ("execute", "pipeline", "pipeline_to"):
            setattr(topology, name, self._counted(getattr(topology, name)))

    def _counted(self, send: Any) -> Any:
        async def counted(*arguments: Any, **named: Any) -> Any:
            self.count += 1
            return await send(*arguments, **named)

        return counted


class Engine:
    """An engine that claims, with its heartbeats stopped so that claims alone are counted."""

    def __init__(self, session: EngineSession, trips: Trips) -> None:
        self.session = session
        self.trips = trips
        self.times: list[float] = []
        self.num_trips = 0
        self.taken: list[tuple[str, float]] = []

    async def claim(self, count: int) -> int:
        before, start = self.trips.count, time.perf_counter()
        found = await self.session.claim(max_requests=count, max_prompt_tokens=10**9)
        self.times.append(time.perf_counter() - start)
        self.num_trips += self.trips.count - before
        self.taken += [(each.request_id, each.waited_s) for each in found]
        return len(found)


@asynccontextmanager
async def running_engines(url: str, count: int) -> AsyncIterator[Sequence[Engine]]:
    async with AsyncExitStack() as stack:
        engines = []
        for number in range(count):
            broker = await stack.enter_async_context(await Broker.connect(url))
            session = EngineSession(broker, model=MODEL, engine_id=f"engine-{number}", on_lost=lambda _: None)
            engines.append(Engine(await stack.enter_async_context(session), Trips(broker)))
        for engine in engines:
            await engine.session.lease.beat()  # all are known to each other
        for engine in engines:
            await engine.session.lease.stop()
            await engine.session.sweeper.stop()
        yield engines


async def cpu_s(broker: Broker) -> float:
    info = await broker.connection.execute("INFO", "cpu")
    return float(info["used_cpu_user"]) + float(info["used_cpu_sys"])


def request(partition: int) -> RequestSpec:
    return RequestSpec(
        request_id=new_request_id(MODEL, partition, "t"),
        model=MODEL,
        tenant="t",
        prompts=[TokenIds(ids=range(100))],
        sampling=SamplingParams(seed=1),
        disconnect_grace_ms=600_000,
    )


async def idle(broker: Broker, engines: Sequence[Engine]) -> str:
    async def poll(engine: Engine) -> None:
        limit = time.monotonic() + IDLE_S
        while time.monotonic() < limit:
            await engine.claim(1)
            await engine.session.wait_for_work(IDLE_PAUSE_S)

    before = await cpu_s(broker)
    await asyncio.gather(*(poll(engine) for engine in engines))
    cpu = (await cpu_s(broker) - before) / IDLE_S
    return f"{figures(engines)}, Redis {cpu * 100:.1f} % of a core"


async def backlog(broker: Broker, engines: Sequence[Engine], partitions: int, count: int, at_once: int) -> str:
    chance = random.Random(7)
    async with GatewaySession(broker) as gateway:
        order = []
        for number in range(count):  # half of them on partition 0
            one = request(0 if number % 2 else chance.randrange(partitions))
            await gateway.accept(one)
            order.append(one.request_id)
            await asyncio.sleep(0.0005)
    await asyncio.sleep(0.3)  # all may be taken by all

    async def drain(engine: Engine) -> None:
        while count > sum(len(each.taken) for each in engines):
            await engine.claim(at_once)
            await asyncio.sleep(0.002)

    before = await cpu_s(broker)
    await asyncio.gather(*(drain(engine) for engine in engines))
    cpu = await cpu_s(broker) - before
    accepted = await accepted_ms(broker, order)
    claimed = [(accepted[taken] + waited_s * 1000, taken) for each in engines for taken, waited_s in each.taken]
    claimed.sort(key=lambda pair: pair[0])  # within a millisecond an engine's claims stay as they came
    off, earliest = 0.0, math.inf
    for _, taken in reversed(claimed):
        earliest = min(earliest, accepted[taken])
        off = max(off, accepted[taken] - earliest)
    return f"{figures(engines)}, Redis {cpu / count * 1e6:.0f} us a request, order off by {off:.0f} ms"


async def accepted_ms(broker: Broker, request_ids: Sequence[str]) -> dict[str, int]:
    """Return when each request was accepted, by Redis' clock."""
    places = [await broker.directory.locate(each) for each in request_ids]
    commands = [("HGET", where.request(each), "accepted") for where, each in zip(places, request_ids, strict=True)]
    found = await broker.connection.pipeline(commands)
    return {each: int(at) for each, at in zip(request_ids, found, strict=True)}


def figures(engines: Sequence[Engine]) -> str:
    times = [each for engine in engines for each in engine.times]
    trips = sum(engine.num_trips for engine in engines)
    mean, worst = statistics.mean(times) * 1e3, max(times) * 1e3
    return f"claim mean {mean:.2f} ms, worst {worst:.1f} ms, {trips / len(times):.1f} round trips"


async def measure(url: str, partitions: int, num_engines: int, count: int) -> None:
    for name, at_once in (("idle", 0), ("backlog, 1 at once", 1), ("backlog, 8 at once", 8)):
        async with await Broker.connect(url) as broker:
            await broker.connection.execute("FLUSHALL")
            await broker.publish_model(ModelCard(name=MODEL, max_model_len=4096), partitions=partitions)
            async with running_engines(url, num_engines) as engines:
                await asyncio.sleep(0.2)
                done = backlog(broker, engines, partitions, count, at_once) if at_once else idle(broker, engines)
                print(f"{partitions:3} partitions, {num_engines:2} engines, {name}: {await done}", flush=True)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--partitions", type=int, nargs="+", default=[4, 256])
    parser.add_argument("--engines", type=int, nargs="+", default=[1, 10])
    parser.add_argument("--requests", type=int, default=1500)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        server = EmbeddedRedis(Path(folder))
        await server.start()
        try:
            for partitions in arguments.partitions:
                for num_engines in arguments.engines:
                    await measure(server.url, partitions, num_engines, arguments.requests)
        finally:
            await server.stop()


if __name__ == "__main__":
    asyncio.run(main())
