"""What a command to Redis takes of a process: as the streams send it, and through redis-py, with and without
their connections.

One command after the other on one connection each, in turn; the script has as many arguments as an accept. Printed: the
medians of processor and wall time of a command.

    PYTHONPATH=tests python tests/benchmarks/redis_commands.py [--rounds 15] [--commands 400]
"""

import argparse
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import median
from typing import Any

import uvloop
from pagestream_streams.connection.embedded import EmbeddedRedis
from pagestream_streams.connection.topologies import light, open_topology
from pagestream_streams.settings import StreamsSettings
from redis.asyncio import ConnectionPool, Redis

ARGUMENTS = ("req-0-0123456789abcdef", b"x" * 300, "tenant", *range(27), "key", "model")


async def compare(url: str, rounds: int, commands: int) -> None:
    """Run and print."""
    clients = {}
    for name in ("redis-py", "redis-py with the streams' connections"):
        pool = ConnectionPool.from_url(url, socket_timeout=5.0, protocol=2)
        if name != "redis-py":
            pool.connection_class = light(pool.connection_class)
        clients[name] = Redis(connection_pool=pool)
    topology = open_topology(url, StreamsSettings())
    run: dict[str, Callable[..., Awaitable[Any]]] = {name: each.execute_command for name, each in clients.items()}
    run["streams"] = topology.execute
    script = await clients["redis-py"].script_load("return 1")
    kinds = {"a script of 32 arguments": ("EVALSHA", script, 0, *ARGUMENTS), "HMGET": ("HMGET", "key", "a", "b")}
    for kind, command in kinds.items():
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in run}
        for _ in range(rounds):
            for name, execute in run.items():
                await execute(*command)
                cpu, wall = time.process_time(), time.perf_counter()
                for _ in range(commands):
                    await execute(*command)
                found[name].append((time.process_time() - cpu, time.perf_counter() - wall))
        for name, times in found.items():
            cpu_us, wall_us = (median(each) / commands * 1e6 for each in zip(*times, strict=True))
            print(f"{kind}, {name}: {cpu_us:.0f} us of processor time, answered after {wall_us:.0f} us")
    for client in clients.values():
        await client.aclose()
    await topology.close()


async def main() -> None:
    """Start a server and measure."""
    parser = argparse.ArgumentParser(description="A command to Redis through two classes of connections.")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--commands", type=int, default=400)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        server = EmbeddedRedis(Path(folder))
        await server.start()
        try:
            await compare(server.url, options.rounds, options.commands)
        finally:
            await server.stop()


if __name__ == "__main__":
    uvloop.run(main())
