"""The number of streams that one gateway process carries, and its processor time per token.

Half of the streams are gRPC, half server-sent events, read by separate client processes; the engine is a process
without a model that appends real entries in steps of up to 256 streams (`tests/support/engines/synthetic_engine.py`).
Printed: tokens received, errors, the time between a stream's tokens (in all, and once every stream of the client has
had its first token), and each process' processor time for a token.

    PYTHONPATH=tests python tests/benchmarks/gateway_streams.py [--streams 2000] [--rate 5] [--tokens 50]

Streams are opened at `--open-rate` a second, by default faster than one gateway accepts them. To see many streams that
are all open, choose a rate that it does accept, and more tokens than come while they are opened.
"""

import argparse
import asyncio
import json
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import quantiles

import grpc.aio
import psutil
import uvloop
from goals import print_goal
from pagestream.v1 import inference_pb2 as pb
from pagestream.v1.inference_pb2_grpc import InferenceStub
from support.engines.synthetic_engine import MODEL
from support.processes.part import Part
from support.processes.stack import Stack
from support.processes.waiting import wait_until

CONNECT_PERIOD_S = 0.2
POSITION = re.compile(rb'"stream_position":"[^/"]+/(\d+)/')
POSITION_BYTES = 128  # of a position that two reads may divide
LIMIT_S = 600.0
ROOT = Path(__file__).resolve().parents[2]


class ClientFigures:
    """The figures of a client process."""

    def __init__(self, streams: int) -> None:
        self.streams = streams
        self.gaps_s: list[float] = []
        self.steady_gaps_s: list[float] = []
        """Once every stream has had its first token, or failed."""
        self.first_s: list[float] = []
        self.tokens = 0
        self.errors: list[str] = []

    def to_json(self, cpu_s: float) -> str:
        """Return the figures as one line."""
        return json.dumps(
            {
                "gaps_s": self.gaps_s,
                "steady_gaps_s": self.steady_gaps_s,
                "first_s": self.first_s,
                "tokens": self.tokens,
                "errors": self.errors,
                "cpu_s": cpu_s,
            }
        )


class Arrivals:
    """The arrivals of one stream."""

    def __init__(self, tallies: ClientFigures) -> None:
        self._tallies = tallies
        self._last = time.perf_counter()
        self._count = 0

    def note(self, tokens: int) -> None:
        """Record tokens that arrived together."""
        now, tallies = time.perf_counter(), self._tallies
        if not self._count:
            tallies.first_s.append(now - self._last)
        else:
            tallies.gaps_s.append(now - self._last)
            if len(tallies.first_s) + len(tallies.errors) == tallies.streams:
                tallies.steady_gaps_s.append(now - self._last)
        self._last = now
        self._count += tokens
        self._tallies.tokens += tokens

    def end(self, expected: int) -> None:
        """Compare with the expected number of tokens."""
        if self._count != expected:
            self._tallies.errors.append(f"{self._count} tokens of {expected}")


async def grpc_stream(stub: InferenceStub, number: int, options: argparse.Namespace, tallies: ClientFigures) -> None:
    """Read one stream."""
    request = pb.GenerateRequest(
        model=MODEL,
        prompt_token_ids=pb.TokenIds(ids=[10 + number % 26, 10 + number // 26 % 26, 10 + number // 676]),
        sampling=pb.SamplingParams(temperature=0.0, max_tokens=options.tokens, ignore_eos=True),
    )
    arrivals = Arrivals(tallies)
    try:
        async for response in stub.Generate(request):
            if response.chunk.token_ids:
                arrivals.note(len(response.chunk.token_ids))
        arrivals.end(options.tokens)
    except grpc.aio.AioRpcError as error:
        tallies.errors.append(f"{error.code()}: {error.details()}")


async def sse_stream(port: int, number: int, options: argparse.Namespace, tallies: ClientFigures) -> None:
    """Read one stream on its own connection. Only positions are parsed, since clients share the cores."""
    content = json.dumps(
        {
            "model": MODEL,
            "prompt": [10 + number % 26, 10 + number // 26 % 26, 10 + number // 676],
            "max_tokens": options.tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
        }
    ).encode()
    arrivals = Arrivals(tallies)
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(content)}\r\nConnection: close\r\n\r\n"
        writer.write(head.encode() + content)
        if b" 200 " not in await reader.readline():
            raise OSError((await reader.read(4096)).decode())
        seen, kept = 0, b""
        while data := await reader.read(65536):
            kept = kept[-POSITION_BYTES:] + data
            index = min(last_index(kept), options.tokens)
            if index > seen:
                arrivals.note(index - seen)
                seen = index
        writer.close()
        arrivals.end(options.tokens)
    except OSError as error:
        tallies.errors.append(repr(error))


def last_index(data: bytes) -> int:
    """Return the index of the last whole position in a piece of a stream; 0 for none.

    An event of a late stream holds several tokens, so that events can't be counted.
    """
    found = POSITION.findall(data)
    return int(found[-1]) if found else 0


async def load(options: argparse.Namespace) -> None:
    """Open this process' share of the streams, some at a time, and read them to their end."""
    tallies = ClientFigures(options.streams)
    at_once = max(1, round(options.open_rate * CONNECT_PERIOD_S))
    cpu_before = time.process_time()
    kind, port = options.role, options.port
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = InferenceStub(channel)
        tasks = []
        for number in range(options.streams):
            stream = (
                grpc_stream(stub, number, options, tallies)
                if kind == "grpc"
                else sse_stream(port, number, options, tallies)
            )
            tasks.append(asyncio.create_task(stream))
            if number % at_once == at_once - 1:
                await asyncio.sleep(CONNECT_PERIOD_S)
        await asyncio.gather(*tasks)
    print(tallies.to_json(time.process_time() - cpu_before))


def start_client(kind: str, port: int, share: float, options: argparse.Namespace, folder: Path) -> Part:
    """Start a client process."""
    streams, rate = round(options.streams * share), options.open_rate * share
    command = [sys.executable, __file__, "--role", kind, "--port", str(port)]
    command += ["--streams", str(streams), "--open-rate", str(rate)]
    part = Part(kind, [*command, "--tokens", str(options.tokens)], folder / f"{kind}.json")
    part.start()
    return part


def cpu_s(part: Part) -> float:
    """Return a process' processor seconds so far."""
    if part.process is None:
        raise RuntimeError(f"{part.name} is not running")
    times = psutil.Process(part.process.pid).cpu_times()
    return float(times.user + times.system)


def describe(values: Sequence[float]) -> str:
    """Return the median and the tail, in milliseconds."""
    if len(values) < 2:
        return "too few"
    cuts = quantiles(values, n=1000)
    return f"p50 {cuts[499] * 1e3:.0f} ms, p99 {cuts[989] * 1e3:.0f} ms, p99.9 {cuts[998] * 1e3:.0f} ms"


def measure(options: argparse.Namespace, folder: Path) -> int:
    """Run the benchmark. Returns 1 if a stream had an error."""
    stack = Stack(folder, model=Path(), engine_options=())
    engine_command = [
        sys.executable,
        "-m",
        "support.engines.synthetic_engine",
        "--redis",
        stack.redis_url,
        "--rate",
        str(options.rate),
    ]
    engine = Part("engine", engine_command, folder / "engine.log", {"PYTHONPATH": str(ROOT / "tests")})
    clients: list[Part] = []
    try:
        stack.redis.start()
        engine.start()
        wait_until(engine.has_said_ready, limit_s=30, what="engine")
        gateway = stack.add_gateway()
        wait_until(gateway.is_ready, limit_s=30, what="gateway")
        watched = {"gateway": gateway, "engine side": engine, "redis": stack.redis}
        before = {name: cpu_s(part) for name, part in watched.items()}
        shares = {"both": (0.5, 0.5), "grpc": (1.0, 0.0), "sse": (0.0, 1.0)}[options.api]
        for kind, port, share in (("grpc", gateway.grpc_port, shares[0]), ("sse", gateway.http_port, shares[1])):
            if share:
                clients.append(start_client(kind, port, share, options, folder))
        started = time.monotonic()
        wait_until(lambda: not any(client.is_alive() for client in clients), limit_s=LIMIT_S, what="the streams")
        wall_s = time.monotonic() - started
        spent = {name: cpu_s(part) - before[name] for name, part in watched.items()}
    finally:
        for part in (*clients, engine, *stack.parts):
            part.stop()
    results = [json.loads(client.log.read_text().splitlines()[-1]) for client in clients]
    tokens = sum(result["tokens"] for result in results)
    errors = [error for result in results for error in result["errors"]]
    print(f"{options.streams} streams ({options.api}), {tokens} tokens in {wall_s:.1f} s, {len(errors)} errors")
    for error, count in Counter(errors).most_common(5):
        print(f"{count} errors: {error}")
    if not tokens:
        return 1
    print("a stream's tokens apart:", describe([gap for result in results for gap in result["gaps_s"]]))
    steady = [gap for result in results for gap in result["steady_gaps_s"]]
    if len(steady) > 1:
        print("once all were open:     ", describe(steady))
    print("first token:            ", describe([gap for result in results for gap in result["first_s"]]))
    print_goal("streams through one gateway without an error", "2,000", f"{options.streams}, {len(errors)} errors")
    for name, seconds in spent.items():
        print(f"{name}: {seconds:.2f} s of processor, {seconds / tokens * 1e6:.1f} us a token")
    for client, result in zip(clients, results, strict=True):
        share = result["cpu_s"] / result["tokens"]
        print(f"client {client.name}: {result['cpu_s']:.2f} s of processor, {share * 1e6:.1f} us a token")
    return 1 if errors else 0


def main() -> int:
    """Measure, or run as one of the client processes."""
    parser = argparse.ArgumentParser(description="Streams that one gateway carries.")
    parser.add_argument("--streams", type=int, default=2000)
    parser.add_argument("--rate", type=float, default=5.0, help="tokens a second of each stream")
    parser.add_argument("--tokens", type=int, default=50)
    parser.add_argument("--open-rate", type=float, default=1000.0, help="streams that are opened a second, in all")
    parser.add_argument("--api", choices=("both", "grpc", "sse"), default="both")
    parser.add_argument("--role", choices=("measure", "grpc", "sse"), default="measure", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role != "measure":
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(load(options))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        return measure(options, Path(folder))


if __name__ == "__main__":
    sys.exit(main())
