"""How far the expected wait of a queued request is off: forecast when it is accepted, compared with its claim.

    PYTHONPATH=tests python tests/benchmarks/wait_forecast.py azure_llm_2023_conv.csv [--loads 80 110] [--seconds 120]

Real time, a real Redis, the gateway's and the engines' sessions; the engines have seats in place of a model, and a
request holds one for as long as its tokens take. Arrivals are the trace's, at the rate that makes the load. The
forecast is that of the answer's headers. "last" says what the request that was claimed last has waited, "mean" what all
until then have on average. Errors are in seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

from pagestream.v1.inference_pb2 import SamplingParams, TokenIds
from pagestream.v1.records_pb2 import ModelCard, RequestSpec
from pagestream_simulator.load import TraceRow, read_trace
from pagestream_streams import Broker, Claim, EmbeddedRedis, EngineSession, GatewaySession
from support.engines.synthetic_engine import answer_entries
from support.protocol.token_streams import append_of

MODEL, TENANT = "benchmark", "t"
ENGINES, SEATS = 2, 16
PREFILL_S, DECODE_S = 1 / 20_000, 0.01
"""Of a token: a request of 1,000 and 200 tokens holds its seat for 2 s."""
WARM_UP = 0.2
"""Of the requests: those before count for nothing."""


@dataclass
class Seen:
    """What came of the requests."""

    forecasts: dict[str, dict[str, float | None]] = field(default_factory=dict)
    """By request and name: the expected wait in seconds."""
    waits: dict[str, float] = field(default_factory=dict)
    """By request, in the order of their claims, in seconds."""

    def table(self, skipped: Sequence[str]) -> list[str]:
        """Return a row for each forecast, of the requests that waited."""
        late = [each for each in self.forecasts if each not in skipped and self.waits[each] > 0.02]
        share, mean = len(late) / (len(self.forecasts) - len(skipped)), statistics.mean(map(self.waits.get, late))
        rows = [f"{share:.0%} waited, {mean:.2f} s on average"]
        for name in ("forecast", "last", "mean"):
            pairs = [(value, self.waits[each]) for each in late if (value := self.forecasts[each][name]) is not None]
            errors = [value - wait for value, wait in pairs]
            off = sorted(map(abs, errors))
            relative = statistics.median(abs(value - wait) / wait for value, wait in pairs)
            rows.append(
                f"{name}: known of {len(pairs) / len(late):.0%}, mean error {statistics.mean(off):.2f}, median "
                f"{statistics.median(off):.2f} ({relative:.0%} of the wait), p90 {off[len(off) * 9 // 10]:.2f}, bias "
                f"{statistics.mean(errors):+.2f}"
            )
        return rows


def seat_s(row: TraceRow) -> float:
    """Return how long a request holds its seat."""
    return row.input_tokens * PREFILL_S + row.output_tokens * DECODE_S


class Engine:
    """An engine with seats in place of a model."""

    def __init__(self, session: EngineSession, seen: Seen) -> None:
        self._session = session
        self._seen = seen
        self._free = SEATS
        self._is_freed = asyncio.Event()

    async def run(self) -> None:
        """Claim and serve until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                self._is_freed.clear()
                claims = await self._session.claim(max_requests=self._free, max_prompt_tokens=10**9)
                for claim in claims:
                    self._seen.waits[claim.request_id] = claim.waited_s
                    self._free -= 1
                    tasks.create_task(self._serve(claim))
                if self._free == 0:
                    await self._is_freed.wait()
                elif not claims:
                    await self._session.wait_for_work(0.1)

    async def _serve(self, claim: Claim) -> None:
        await asyncio.sleep(float(claim.spec.client_request_id))
        await self._session.append([append_of(claim, 0, list(answer_entries(claim.spec)))])
        self._free += 1
        self._is_freed.set()


async def accept(gateway: GatewaySession, broker: Broker, row: TraceRow, seen: Seen) -> None:
    """Accept a request of a trace, and ask at once how long it may wait."""
    prompt = [len(seen.forecasts), *range(row.input_tokens - 1)]
    spec = RequestSpec(
        request_id=await gateway.place(MODEL, prompt, TENANT),
        model=MODEL,
        tenant=TENANT,
        prompts=[TokenIds(ids=prompt)],
        sampling=SamplingParams(seed=1, max_tokens=1),
        client_request_id=str(seat_s(row)),
        disconnect_grace_ms=600_000,
    )
    forecasts: dict[str, float | None] = dict.fromkeys(("forecast", "last", "mean"))
    if seen.waits:
        forecasts["last"] = next(reversed(seen.waits.values()))
        forecasts["mean"] = statistics.fmean(seen.waits.values())
    seen.forecasts[spec.request_id] = forecasts
    await gateway.accept(spec)
    place = await broker.queue_position(spec.request_id, TENANT)
    forecasts["forecast"] = 0.0 if place is None else None if place.wait_ms is None else place.wait_ms / 1000


async def measure(url: str, rows: Sequence[TraceRow], load: int, seconds: float) -> list[str]:
    """Serve a trace's first requests at a load in percent; return the rows of the table."""
    busy = accumulate(seat_s(row) / (load / 100 * ENGINES * SEATS) for row in rows)
    rows = [row for row, until in zip(rows, busy, strict=True) if until <= seconds]
    pace = seconds / rows[-1].arrival_s
    seen = Seen()
    async with AsyncExitStack() as stack:
        broker = await stack.enter_async_context(await Broker.connect(url))
        await broker.connection.execute("FLUSHALL")
        await broker.publish_model(ModelCard(name=MODEL, max_model_len=100_000), partitions=4)
        gateway = await stack.enter_async_context(GatewaySession(broker))
        sessions = []
        for number in range(ENGINES):
            own = await stack.enter_async_context(await Broker.connect(url))
            session = EngineSession(own, model=MODEL, engine_id=f"engine-{number}", on_lost=lambda _: None)
            sessions.append(await stack.enter_async_context(session))
        serving = [asyncio.create_task(Engine(each, seen).run()) for each in sessions]
        begin = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            for row in rows:
                await asyncio.sleep(begin + row.arrival_s * pace - time.monotonic())
                tasks.create_task(accept(gateway, broker, row, seen))
        while len(seen.waits) < len(rows):  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        for each in serving:
            each.cancel()
        await asyncio.wait(serving)
    return seen.table(list(seen.forecasts)[: round(len(rows) * WARM_UP)])


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", help="a file with arrivals and lengths")
    parser.add_argument("--loads", type=int, nargs="+", default=[80, 110], help="percent of what the engines can do")
    parser.add_argument("--seconds", type=float, default=120.0)
    options = parser.parse_args()
    rows = read_trace(options.trace)
    with tempfile.TemporaryDirectory() as folder:
        server = EmbeddedRedis(Path(folder))
        await server.start()
        try:
            for load in options.loads:
                for row in await measure(server.url, rows, load, options.seconds):
                    print(f"{load} %: {row}", flush=True)
        finally:
            await server.stop()


if __name__ == "__main__":
    asyncio.run(main())
