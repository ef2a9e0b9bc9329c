"""What limits add to an accept: one round trip, against the same accept without limits, in turn.

    PYTHONPATH=tests python tests/benchmarks/streams_limits.py [--accepts 400] [--rounds 5]

A real Redis on this machine, one accept after another. With limits the tenant and its credential have all five of them,
and none refuses anything.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter

from pagestream_streams import Broker, GatewaySession
from pagestream_streams.rates import Limits
from support.protocol.token_streams import MODEL, STILL, card, spec
from support.redis.servers import running_server

WIDE = Limits(*[10**9] * 5)


class Wide:
    """Limits that nobody reaches."""

    def of(self, tenant: str, credential: str) -> tuple[Limits, Limits]:
        return WIDE, WIDE


async def seconds_of(gateway: GatewaySession, count: int) -> float:
    """Return the median seconds of an accept."""
    found = []
    for number in range(count):
        made = spec(partition=number % 4, tenant=f"tenant-{number % 50}")
        made.sampling.max_tokens = 100
        made.credential = "k"
        began = perf_counter()
        await gateway.accept(made)
        found.append(perf_counter() - began)
    return median(found)


async def measure(url: str, count: int, rounds: int) -> None:
    async with await Broker.connect(url, STILL) as broker:
        await broker.publish_model(card(MODEL), partitions=4)
        async with GatewaySession(broker) as plain, GatewaySession(broker, limits=Wide()) as limited:
            without, beside = [], []
            for turn in range(rounds + 1):
                pair = await seconds_of(plain, count), await seconds_of(limited, count)
                if turn:  # the first one loads the scripts
                    without.append(pair[0])
                    beside.append(pair[1])
                for model in range(4):
                    where = broker.connection.keyspace.partition(MODEL, model)
                    for name in ("queue:0", "tenants:0", "meta"):
                        await broker.connection.execute("DEL", where.prefix + name)
    plain_ms, limited_ms = 1000 * median(without), 1000 * median(beside)
    print(f"accept without limits: {plain_ms:.2f} ms, with ten limits: {limited_ms:.2f} ms (median of {rounds} rounds)")
    print(f"added: {limited_ms - plain_ms:.2f} ms, {limited_ms / plain_ms:.2f} times")


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--accepts", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, running_server(Path(folder)) as server:
        asyncio.run(measure(server.url, options.accepts, options.rounds))


if __name__ == "__main__":
    main()
