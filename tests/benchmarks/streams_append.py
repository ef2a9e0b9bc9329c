"""The cost of the fence: a step's scripted append against plain pipelined XADDs of the same content, on one server.

python tests/benchmarks/streams_append.py [--requests 256] [--steps 200] [--rounds 5]
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from goals import print_goal
from pagestream.v1.inference_pb2 import SamplingParams, TokenIds
from pagestream.v1.records_pb2 import LogEntry, ModelCard, RequestSpec
from pagestream_streams import Broker, Claim, EmbeddedRedis, EngineSession, GatewaySession
from pagestream_streams.protocol.keys import new_request_id
from pagestream_streams.protocol.records import chain
from support.protocol.token_streams import append_of

MODEL = "benchmark"


class Plain:
    """Appends the same entries without fence, state and digest check."""

    def __init__(self, broker: Broker, claims: list[Claim]) -> None:
        self.broker = broker
        self.keys = [f"plain:{claim.request_id}" for claim in claims]

    async def step(self, index: int, entries: list[LogEntry]) -> None:
        await self.broker.connection.pipeline(
            [
                ("XADD", key, f"{index + 1}-0", "c", 0, "t", entry.token_id, "x", entry.text, "d", entry.digest)
                for key, entry in zip(self.keys, entries, strict=True)
            ]
        )


class Fenced:
    def __init__(self, engine: EngineSession, claims: list[Claim]) -> None:
        self.engine = engine
        self.claims = claims

    async def step(self, index: int, entries: list[LogEntry]) -> None:
        appends = [append_of(claim, index, [entry]) for claim, entry in zip(self.claims, entries, strict=True)]
        outcomes = await self.engine.append(appends)
        if any(outcome.next_index != index + 1 for outcome in outcomes):
            raise RuntimeError(f"step {index} was not appended: {outcomes}")


async def server_cpu_s(broker: Broker) -> float:
    info = await broker.connection.execute("INFO", "cpu")
    return float(info["used_cpu_user"]) + float(info["used_cpu_sys"])


async def timed(
    broker: Broker, step: Callable[[int, list[LogEntry]], Awaitable[None]], steps: list[list[LogEntry]], first: int
) -> tuple[float, float]:
    cpu, start = await server_cpu_s(broker), time.perf_counter()
    for number, entries in enumerate(steps):
        await step(first + number, entries)
    return time.perf_counter() - start, await server_cpu_s(broker) - cpu


def request() -> RequestSpec:
    return RequestSpec(
        request_id=new_request_id(MODEL, 0, "t"),
        model=MODEL,
        tenant="t",
        prompts=[TokenIds(ids=range(100))],
        sampling=SamplingParams(seed=1),
        disconnect_grace_ms=600_000,
    )


async def claimed(engine: EngineSession, count: int) -> list[Claim]:
    """Return `count` requests, claimed by one engine."""
    claims: list[Claim] = []
    while len(claims) < count:
        claims += await engine.claim(max_requests=count - len(claims), max_prompt_tokens=10**9)
    return claims


async def compare(broker: Broker, requests: int, steps: int, rounds: int) -> None:
    await broker.publish_model(ModelCard(name=MODEL, max_model_len=4096), partitions=1)
    async with (
        GatewaySession(broker) as gateway,
        EngineSession(broker, model=MODEL, on_lost=lambda lost: print(f"lost {len(lost)}")) as engine,
    ):
        for _ in range(requests):
            await gateway.accept(request())
        claims = await claimed(engine, requests)
        plain, fenced = Plain(broker, claims), Fenced(engine, claims)
        digest, ratios, cpu_ratios = "", [], []
        for number in range(rounds):
            prepared = []
            for index in range(number * steps, (number + 1) * steps):
                entry = LogEntry(token_id=index, text=" token")
                digest = entry.digest = chain(digest, entry)
                prepared.append([entry] * requests)
            first = number * steps
            plain_s, plain_cpu = await timed(broker, plain.step, prepared, first)
            fenced_s, fenced_cpu = await timed(broker, fenced.step, prepared, first)
            ratios.append(plain_s / fenced_s)
            cpu_ratios.append(plain_cpu / fenced_cpu)
            tokens = steps * requests
            print(
                f"round {number}: plain {tokens / plain_s:9,.0f}/s (server CPU {plain_cpu / tokens * 1e6:.2f} us), "
                f"fenced {tokens / fenced_s:9,.0f}/s ({fenced_cpu / tokens * 1e6:.2f} us, wake-ups included)"
            )
        print(
            f"fenced rate / plain rate: median {statistics.median(ratios):.2f} of {rounds} rounds, {requests} requests"
        )
        print_goal("rate of fenced appends, of plain XADDs' rate", ">= 0.60", f"{statistics.median(ratios):.2f}")
        print_goal("appends a second", "300,000 where the machine allows", f"{tokens / fenced_s:,.0f}")
        print(f"plain server CPU / fenced server CPU: median {statistics.median(cpu_ratios):.2f}")


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        server = EmbeddedRedis(Path(folder))
        await server.start()
        try:
            async with await Broker.connect(server.url) as broker:
                await compare(broker, arguments.requests, arguments.steps, arguments.rounds)
        finally:
            await server.stop()


if __name__ == "__main__":
    asyncio.run(main())
