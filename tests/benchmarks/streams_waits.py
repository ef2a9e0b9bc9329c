"""The cost of a wait for the disk or a replica after each write.

Ratios to `appendfsync everysec` without a wait, on one server with one replica, in one run.

    PYTHONPATH=tests python tests/benchmarks/streams_waits.py [--requests 64] [--steps 100] [--rounds 3] [--short]
"""

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from pagestream.v1.records_pb2 import LogEntry, ModelCard
from pagestream_streams import Broker, EngineSession, GatewaySession, StreamsSettings
from pagestream_streams.connection.embedded import find_servers
from pagestream_streams.protocol.records import chain
from streams_append import MODEL, Fenced, claimed, request
from support.redis.topologies import HOST, Server, Topology, running, server, until

NUM_ACCEPTS = 50
LIMIT_S = 6.0
"""Limit for the appends of one mode in one round: a mode that waits for a sync each second makes few."""
WAITAOF_VERSION = (7, 2)


@dataclass(frozen=True)
class Mode:
    """The settings of the server and of the streams."""

    name: str
    appendfsync: str = "everysec"
    replicas: int = 0
    on_disk: bool = False

    @property
    def settings(self) -> StreamsSettings:
        return StreamsSettings(wait_replicas=self.replicas, wait_fsync=self.on_disk, wait_timeout_ms=5000)


MODES = (
    Mode("everysec"),
    Mode("always", "always"),
    Mode("everysec, WAIT 1", replicas=1),
    Mode("always, WAIT 1", "always", replicas=1),
    Mode("everysec, WAITAOF 1 0", on_disk=True),
    Mode("always, WAITAOF 1 0", "always", on_disk=True),
    Mode("always, WAITAOF 1 1", "always", replicas=1, on_disk=True),
)


@dataclass
class Measured:
    """The rounds of a mode."""

    tokens_per_s: list[float] = field(default_factory=list)
    accept_ms: list[float] = field(default_factory=list)


@contextmanager
def master_and_replica(folder: Path) -> Iterator[tuple[Topology, tuple[int, int, int]]]:
    """Start the newest server of this machine with a replica; both keep append-only files."""
    binary = max(find_servers(), key=lambda each: each.version)
    master = server(binary, folder / "master")
    replica = server(binary, folder / "replica", "--replicaof", f"{HOST} {master.port}")
    with running(Topology(f"redis://{HOST}:{master.port}/0", [master, replica])) as topology:
        for each in topology.servers:
            each.start()
            until(each.answers, "the servers", topology.servers)
        until(lambda: is_followed(master), "the replica to follow", topology.servers)
        yield topology, binary.version


def is_followed(master: Server) -> bool:
    answer = master.ask("WAIT", 1, 100)
    return answer == 1


def fsync_ms(folder: Path) -> float:
    """Return the disk's time to sync a small write: the median of 50."""
    took: list[float] = []
    descriptor = os.open(folder / "probe", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    try:
        for _ in range(50):
            os.write(descriptor, b"x" * 512)
            started = time.perf_counter()
            os.fsync(descriptor)
            took.append(time.perf_counter() - started)
    finally:
        os.close(descriptor)
    return statistics.median(took) * 1000


@asynccontextmanager
async def sessions(url: str, mode: Mode) -> AsyncIterator[tuple[GatewaySession, EngineSession]]:
    async with await Broker.connect(url, mode.settings) as broker:
        await broker.publish_model(ModelCard(name=MODEL, max_model_len=4096), partitions=1)
        async with (
            GatewaySession(broker) as gateway,
            EngineSession(broker, model=MODEL, on_lost=lambda lost: print(f"lost {len(lost)}")) as engine,
        ):
            yield gateway, engine


async def measure(topology: Topology, mode: Mode, requests: int, steps: int, result: Measured) -> None:
    """Run one round: accepts one after the other, then a token for each request in each step."""
    for each in topology.servers:
        each.ask("CONFIG", "SET", "appendfsync", mode.appendfsync)
    topology.servers[0].ask("FLUSHALL")
    async with sessions(topology.url, mode) as (gateway, engine):
        took: list[float] = []
        end = time.perf_counter() + LIMIT_S
        while len(took) < NUM_ACCEPTS and time.perf_counter() < end:
            started = time.perf_counter()
            await gateway.accept(request())
            took.append(time.perf_counter() - started)
        result.accept_ms.append(statistics.median(took) * 1000)
        await asyncio.gather(*(gateway.accept(request()) for _ in range(requests - len(took))))
        fenced = Fenced(engine, await claimed(engine, max(requests, len(took))))
        digest, done = "", 0
        started = time.perf_counter()
        while done < steps and time.perf_counter() < started + LIMIT_S:
            entry = LogEntry(token_id=done, text=" token")
            digest = entry.digest = chain(digest, entry)
            await fenced.step(done, [entry] * len(fenced.claims))
            done += 1
        result.tokens_per_s.append(done * len(fenced.claims) / (time.perf_counter() - started))


async def compare(folder: Path, requests: int, steps: int, rounds: int) -> None:
    with master_and_replica(folder) as (topology, version):
        modes = [mode for mode in MODES if not mode.on_disk or version >= WAITAOF_VERSION]
        results = {mode: Measured() for mode in modes}
        for _ in range(rounds):
            for mode in modes:
                await measure(topology, mode, requests, steps, results[mode])
    print(f"server {'.'.join(map(str, version))}, one replica; this disk syncs in {fsync_ms(folder):.2f} ms (median)")
    print(f"{requests} requests a step; the best of {rounds} rounds of each mode, in turns")
    print(f"| {'mode':<24} | tokens/s | of everysec's | accept | of everysec's |")
    print("|---|---|---|---|---|")
    base = results[modes[0]]
    for mode, each in results.items():
        rate, accept = max(each.tokens_per_s), min(each.accept_ms)
        print(
            f"| {mode.name:<24} | {rate:,.0f} | {rate / max(base.tokens_per_s):.3f} "
            f"| {accept:.2f} ms | {accept / min(base.accept_ms):.1f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=64, help=f"at least {NUM_ACCEPTS}")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--short", action="store_true", help="shows that it works, no figures")
    options = parser.parse_args()
    if options.short:
        options.steps, options.rounds = 10, 1
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:  # a real disk, where /tmp may be memory
        asyncio.run(compare(Path(folder), max(options.requests, NUM_ACCEPTS), options.steps, options.rounds))


if __name__ == "__main__":
    main()
