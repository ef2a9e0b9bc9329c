"""The delay that the path's hops alone add to a first token: the same libraries and processes, and nothing else done.

A `grpc.aio` server, a worker and an engine process with Redis between the first two, as a request of the real path
passes them: a script that stores it and rings, a script that claims it, a pipe to the engine's process, a step that
sleeps, a script that appends the token and wakes the gateway. No checks, no tokenizer, no lease, no tenant, no metric,
and nothing survives a crash. Its connections are those of the real path, lighter than redis-py's own and with commands
gathered (docs/design/redis.md); with `--plain` they are redis-py's own, one command a round trip. The step is short: a
request that comes during a long one waits for its end, which is no hop.

    PYTHONPATH=tests python tests/benchmarks/bare_path.py [--rate 15] [--plain] [--step-ms 1] [--repeats 3]

Without `--rate` all requests come at once. Printed: the medians of the time to the answer, less the step.
"""

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median
from typing import Any

import grpc.aio
import uvloop
from full_path import due_times
from pagestream.v1 import inference_pb2 as pb
from pagestream.v1.inference_pb2_grpc import InferenceServicer, InferenceStub, add_InferenceServicer_to_server
from pagestream_streams.connection.embedded import EmbeddedRedis
from pagestream_streams.connection.topologies import open_topology
from pagestream_streams.settings import StreamsSettings
from redis.asyncio import Redis
from redis.asyncio.client import PubSub
from support.processes.part import Part
from support.processes.stack import free_port
from support.processes.waiting import wait_until

Execute = Callable[..., Awaitable[Any]]

QUEUE, BELL, WAKE = "queue", "bell", "wake"
ACCEPT = f"""
redis.call('HSET', 'request:' .. ARGV[1], 'record', ARGV[2])
redis.call('XADD', '{QUEUE}', '*', 'id', ARGV[1])
redis.call('PUBLISH', '{BELL}', ARGV[1])
"""
CLAIM = f"""
local claimed = {{}}
for _, entry in ipairs(redis.call('XRANGE', '{QUEUE}', '-', '+', 'COUNT', 64)) do
  redis.call('XDEL', '{QUEUE}', entry[1])
  claimed[#claimed + 1] = entry[2][2]
  redis.call('HGET', 'request:' .. entry[2][2], 'record')
end
return claimed
"""
APPEND = f"""
for _, id in ipairs(ARGV) do
  redis.call('XADD', 'log:' .. id, '*', 'token', '7')
end
redis.call('PUBLISH', '{WAKE}', table.concat(ARGV, ' '))
"""


class Bare(InferenceServicer):
    """Hands each request to the worker, and its one token back."""

    def __init__(self, execute: Execute, accept: str) -> None:
        self._execute = execute
        self._accept = accept
        self._waiting: dict[str, asyncio.Future[None]] = {}

    async def Generate(  # noqa: N802 - the method's name in the contract
        self, request: pb.GenerateRequest, context: Any
    ) -> None:
        """Write one chunk."""
        request_id = os.urandom(16).hex()
        waiting = self._waiting[request_id] = asyncio.get_running_loop().create_future()
        await self._execute("EVALSHA", self._accept, 0, request_id, request.SerializeToString())
        await waiting
        response = pb.GenerateResponse()
        response.chunk.request_id, response.chunk.text = request_id, "a"
        response.chunk.token_ids.append(7)
        await context.write(response)

    async def wake(self, messages: AsyncIterator[bytes]) -> None:
        """Answer the requests whose tokens come."""
        async for message in messages:
            for request_id in message.decode().split():
                self._waiting.pop(request_id).set_result(None)


@asynccontextmanager
async def connected(url: str, *, is_plain: bool) -> AsyncIterator[tuple[Execute, PubSub]]:
    """Yield what runs a command, and a subscriber."""
    if is_plain:
        async with Redis.from_url(url, protocol=2) as redis:
            yield redis.execute_command, redis.pubsub()
    else:
        topology = open_topology(url, StreamsSettings())
        yield topology.execute, topology.pubsub()
        await topology.close()


async def listen(subscriber: PubSub, channel: str) -> AsyncIterator[bytes]:
    """Subscribe, and return what comes."""
    await subscriber.subscribe(channel)
    await subscriber.get_message(timeout=None)

    async def messages() -> AsyncIterator[bytes]:
        async for message in subscriber.listen():
            yield message["data"]

    return messages()


async def serve_gateway(url: str, port: int, *, is_plain: bool) -> None:
    """Serve until killed."""
    async with connected(url, is_plain=is_plain) as (execute, subscriber):
        servicer = Bare(execute, (await execute("SCRIPT", "LOAD", ACCEPT)).decode())
        server = grpc.aio.server()
        add_InferenceServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
        server.add_insecure_port(f"127.0.0.1:{port}")
        await server.start()
        waking = asyncio.create_task(servicer.wake(await listen(subscriber, WAKE)))
        print('{"ready": true}', flush=True)
        await waking


async def serve_worker(url: str, step_ms: float, *, is_plain: bool) -> None:
    """Claim what the bell tells of, hand it to the engine's process, append what comes back; until killed."""
    command = [sys.executable, __file__, "--part", "engine", "--step-ms", str(step_ms)]
    engine = await asyncio.create_subprocess_exec(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert engine.stdin is not None
    assert engine.stdout is not None
    async with connected(url, is_plain=is_plain) as (execute, subscriber):
        claim, append = [(await execute("SCRIPT", "LOAD", script)).decode() for script in (CLAIM, APPEND)]
        bell = await listen(subscriber, BELL)
        print('{"ready": true}', flush=True)

        async def append_steps() -> None:
            while line := await engine.stdout.readline():
                await execute("EVALSHA", append, 0, *line.split())

        appending = asyncio.create_task(append_steps())
        async for _ in bell:
            claimed = await execute("EVALSHA", claim, 0)
            if claimed:
                engine.stdin.write(b" ".join(claimed) + b"\n")
        await appending


def run_engine(step_ms: float) -> None:
    """Take what has come, sleep a step, give it back: until the pipe ends."""
    while came := os.read(0, 1 << 16):
        time.sleep(step_ms / 1000)
        os.write(1, b" ".join(came.split()) + b"\n")


async def ask(target: str, due: Sequence[float]) -> list[float]:
    """Return the seconds to each answer."""

    async def one(stub: InferenceStub, at: float) -> float:
        await asyncio.sleep(started + at - time.perf_counter())
        sent = time.perf_counter() if any(due) else started
        async for _ in stub.Generate(request):
            took = time.perf_counter() - sent
        return took

    request = pb.GenerateRequest(model="demo", prompt_token_ids=pb.TokenIds(ids=range(144)))
    async with grpc.aio.insecure_channel(target) as channel:
        await channel.channel_ready()
        stub = InferenceStub(channel)
        started = time.perf_counter()
        return await asyncio.gather(*(one(stub, at) for at in due))


def measure(options: argparse.Namespace, folder: Path) -> list[float]:
    """Return each repetition's median, in ms, less the step; the first one is not counted."""
    (folder / "redis").mkdir()
    redis, port = EmbeddedRedis(folder / "redis"), free_port()
    asyncio.run(redis.start())
    common = [sys.executable, __file__, "--redis", redis.url, "--step-ms", str(options.step_ms)]
    common += ["--plain"] if options.plain else []
    gateway = Part("gateway", (*common, "--part", "gateway", "--port", str(port)), folder / "gateway.log")
    worker = Part("worker", (*common, "--part", "worker"), folder / "worker.log")
    try:
        for part in (gateway, worker):
            part.start()
            wait_until(part.has_said_ready, f"the {part.name}")
        due = due_times(options.requests, options.rate)
        runs = [asyncio.run(ask(f"127.0.0.1:{port}", due)) for _ in range(1 + options.repeats)]
    finally:
        gateway.stop()
        worker.stop()
        asyncio.run(redis.stop())
    return [median(took) * 1000 - options.step_ms for took in runs[1:]]


def main() -> None:
    """Print the medians."""
    parser = argparse.ArgumentParser(description="What the hops of the path alone add to a first token.")
    parser.add_argument("--step-ms", type=float, default=1.0)
    parser.add_argument("--rate", type=float, metavar="R", help="requests a second, at random (default: all at once)")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--plain", action="store_true", help="redis-py's own connections, one command a round trip")
    parser.add_argument("--part", choices=["gateway", "worker", "engine"], help=argparse.SUPPRESS)
    parser.add_argument("--redis", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part == "gateway":
        uvloop.run(serve_gateway(options.redis, options.port, is_plain=options.plain))
    elif options.part == "worker":
        uvloop.run(serve_worker(options.redis, options.step_ms, is_plain=options.plain))
    elif options.part == "engine":
        run_engine(options.step_ms)
    else:
        with tempfile.TemporaryDirectory() as folder:
            runs = measure(options, Path(folder))
        shown = ", ".join(f"{each:.1f}" for each in runs)
        print(f"added to the first token by the hops alone, p50: {median(runs):+.1f} ms (of {shown})")


if __name__ == "__main__":
    main()
