"""Processor time of a gateway for a token, against bare servers and against another checkout's gateway.

64 streams of 20 tokens a second from an engine without a model. Each round has one window for each server, in turn: the
gateway of this tree, that of `--base`, and a bare server that writes as many bytes as often and does nothing else.
Acceptance and the first tokens are left out. Printed: medians of the rounds and their ratios.

    PYTHONPATH=tests python tests/benchmarks/gateway_cost.py [--base CHECKOUT] [--rounds 5] [--api grpc|sse|both]
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import grpc.aio
import uvloop
from gateway_streams import ClientFigures, grpc_stream, sse_stream
from goals import print_goal
from pagestream.v1 import inference_pb2 as pb
from pagestream.v1.inference_pb2_grpc import InferenceServicer, InferenceStub, add_InferenceServicer_to_server
from support.processes.part import Part
from support.processes.stack import Gateway, Stack, free_port
from support.processes.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
REQUEST_ID = "req-0-0123456789abcdef0123456789abcdef"
DIGEST = "0123456789abcdef"
WARM_TOKENS = 10  # of each stream, before the window
LIMIT_S = 120.0
GOALS = {"grpc": ("bare server", 1.7), "sse": ("base", 0.7)}


def cpu_s(pid: int) -> float:
    """Return the processor seconds of all threads of a process, to the nanosecond."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


class Ticks:
    """Wakes all streams of a bare server together, as one wake-up message wakes a gateway's."""

    def __init__(self, rate: float) -> None:
        self._interval_s = 1 / rate
        self._next: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        """Tick until cancelled."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            due += self._interval_s
            await asyncio.sleep(max(0.0, due - loop.time()))
            done, self._next = self._next, loop.create_future()
            done.set_result(None)

    async def wait(self) -> None:
        """Wait for the next tick."""
        await asyncio.shield(self._next)


class BareServicer(InferenceServicer):
    """Writes a chunk at each tick."""

    def __init__(self, ticks: Ticks) -> None:
        self._ticks = ticks

    async def Generate(  # noqa: N802 - the method's name in the contract
        self, request: pb.GenerateRequest, context: Any
    ) -> None:
        """Write as many chunks as tokens are asked for."""
        for index in range(request.sampling.max_tokens):
            await self._ticks.wait()
            response = pb.GenerateResponse()
            chunk = response.chunk
            chunk.request_id, chunk.next_index, chunk.digest, chunk.text = REQUEST_ID, index + 1, DIGEST, "a"
            chunk.token_ids.append(10 + index)
            await context.write(response)


def sse_event(index: int) -> bytes:
    """Return an event of the size of a gateway's, as a chunk of an HTTP body."""
    event = (
        f'id: {REQUEST_ID}/{index}/{DIGEST}\ndata: {{"id":"{REQUEST_ID}","object":"text_completion",'
        '"created":1700000000,"model":"synthetic","system_fingerprint":"synthetic","service_tier":"default",'
        '"choices":[{"index":0,"text":"a","logprobs":null,"finish_reason":null}],'
        f'"stream_position":"{REQUEST_ID}/{index}/{DIGEST}"}}\n\n'
    ).encode()
    return b"%x\r\n%b\r\n" % (len(event), event)


async def serve_bare(kind: str, port: int, rate: float) -> None:
    """Serve until killed."""
    ticks = Ticks(rate)
    ticking = asyncio.create_task(ticks.run())

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
        tokens = json.loads(await reader.readexactly(length))["max_tokens"]
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        for index in range(tokens):
            await ticks.wait()
            writer.write(sse_event(index + 1))
            await writer.drain()
        writer.write(b"0\r\n\r\n")
        writer.close()

    if kind == "grpc":
        server = grpc.aio.server()
        add_InferenceServicer_to_server(BareServicer(ticks), server)  # type: ignore[no-untyped-call]
        server.add_insecure_port(f"127.0.0.1:{port}")
        await server.start()
    else:
        await asyncio.start_server(answer, "127.0.0.1", port)
    print('{"ready": true}', flush=True)
    await ticking


async def read_streams(options: argparse.Namespace) -> None:
    """Read all streams of a server; print its processor time for a token between the first and the last ones."""
    figures = ClientFigures(options.streams)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{options.port}") as channel:
        stub = InferenceStub(channel)
        tasks = [
            asyncio.create_task(
                grpc_stream(stub, number, options, figures)
                if options.api == "grpc"
                else sse_stream(options.port, number, options, figures)
            )
            for number in range(options.streams)
        ]
        marks: list[tuple[int, float]] = []
        for bound in (WARM_TOKENS, options.tokens - WARM_TOKENS):
            while figures.tokens < bound * options.streams:
                done, _ = await asyncio.wait(tasks, timeout=0.01)
                if len(done) == len(tasks):
                    break
            marks.append((figures.tokens, cpu_s(options.pid)))
        await asyncio.gather(*tasks)
    (tokens, seconds), (later_tokens, later_seconds) = marks
    cost_us = (later_seconds - seconds) / max(1, later_tokens - tokens) * 1e6
    print(json.dumps({"cost_us": cost_us, "errors": figures.errors}), flush=True)


def own_part(name: str, folder: Path, *arguments: str) -> Part:
    """Return a process of this module."""
    return Part(name, [sys.executable, __file__, *arguments], folder / f"{name}.log")


def start_gateway(stack: Stack, checkout: Path, name: str) -> Gateway:
    """Start the gateway of a checkout."""
    names = ("options", "grammars", "telemetry", "streams", "batches", "gateway")
    packages = ("proto", *(f"services/{each}" for each in names))
    path = os.pathsep.join(str(checkout / each / "src") for each in packages)
    http_port, grpc_port = free_port(), free_port()
    command = [sys.executable, "-m", "pagestream_gateway", "--redis", stack.redis_url, "--gateway-id", name]
    command += ["--http-port", str(http_port), "--grpc-port", str(grpc_port)]
    log = stack.folder / f"{name}.log"
    part = Gateway(name, command, log, {"PYTHONPATH": path}, http_port=http_port, grpc_port=grpc_port)
    part.start()
    return part


Target = tuple[Part, int]
"""A server and its port."""


def window(targets: Sequence[Target], api: str, options: argparse.Namespace, folder: Path) -> float:
    """Return microseconds of processor for a token in one window, of all servers at once."""
    clients = [start_client(target, api, len(targets), options, folder) for target in targets]
    wait_until(lambda: not any(client.is_alive() for client in clients), limit_s=LIMIT_S, what="the streams")
    results = [json.loads(client.log.read_text().splitlines()[-1]) for client in clients]
    for (part, _), result in zip(targets, results, strict=True):
        if result["errors"]:
            raise RuntimeError(f"{part.name}: {result['errors'][:3]}")
    return sum(float(result["cost_us"]) for result in results) / len(results)


def start_client(target: Target, api: str, share: int, options: argparse.Namespace, folder: Path) -> Part:
    """Start the client of one server, with one of so many shares of the streams, or with `--each` with all of them."""
    part, port = target
    if part.process is None:
        raise RuntimeError(f"{part.name} is not running")
    streams = options.streams if options.each else options.streams // share
    given = {"api": api, "port": port, "pid": part.process.pid, "streams": streams, "tokens": options.tokens}
    arguments = [text for name, value in given.items() for text in (f"--{name}", str(value))]
    client = own_part(f"client-{part.name}", folder, "--role", "client", *arguments)
    client.log.unlink(missing_ok=True)
    client.start()
    return client


def measure(options: argparse.Namespace, folder: Path) -> None:
    """Run all windows and print the figures."""
    stack = Stack(folder, model=Path(), engine_options=())
    rate = str(options.rate)
    command = [sys.executable, "-m", "support.engines.synthetic_engine", "--redis", stack.redis_url, "--rate", rate]
    engine = Part("engine", [*command, "--max-model-len", "4096"], folder / "engine.log")
    apis = ("grpc", "sse") if options.api == "both" else (options.api,)
    ports = {api: free_port() for api in apis}
    bare = {
        api: own_part(f"bare-{api}", folder, "--role", f"bare-{api}", "--port", str(ports[api]), "--rate", rate)
        for api in apis
    }
    started: list[Part] = [stack.redis, engine, *bare.values()]
    costs: dict[tuple[str, str], list[float]] = {}
    try:
        for part in started:
            part.start()
        own = [start_gateway(stack, ROOT, f"gateway-{number}") for number in range(max(options.gateways))]
        gateways = {"gateway" if count == 1 else f"{count} gateways": own[:count] for count in options.gateways}
        started += own
        if options.base is not None:
            gateways["base"] = [start_gateway(stack, options.base.resolve(), "base")]
            started += gateways["base"]
        for part in (engine, *bare.values()):
            wait_until(part.has_said_ready, limit_s=60, what=part.name)
        for gateway in (each for group in gateways.values() for each in group):
            wait_until(gateway.has_become_ready, limit_s=60, what=gateway.name)
        for _ in range(options.rounds):
            for api in apis:
                targets: dict[str, list[Target]] = {"bare server": [(bare[api], ports[api])]}
                for name, group in gateways.items():
                    targets[name] = [(each, each.grpc_port if api == "grpc" else each.http_port) for each in group]
                for name, group_targets in targets.items():
                    costs.setdefault((api, name), []).append(window(group_targets, api, options, folder))
    finally:
        for part in reversed(started):
            part.stop()
    report(costs)


def report(costs: dict[tuple[str, str], list[float]]) -> None:
    """Print medians, and the gateway's ratio to the others by round."""
    for (api, name), values in costs.items():
        shown = ", ".join(f"{value:.1f}" for value in values)
        print(f"{api}, {name}: median {median(values):.1f} us of processor a token ({shown})")
    for (api, name), values in costs.items():
        if name == "gateway":
            continue
        ratio = median(own / other for own, other in zip(costs[api, "gateway"], values, strict=True))
        print(f"{api}: {ratio:.2f} x {name}")
        if name.endswith(" gateways"):
            print_goal(
                f"processor time of a token, {api}, one gateway against {name}", "0.9 to 1.1 x", f"{ratio:.2f} x"
            )
        against, goal = GOALS[api]
        if name == against:
            print_goal(f"processor time of a token, {api}, against the {name}", f"<= {goal} x", f"{ratio:.2f} x")


def main() -> None:
    """Measure, or run as one of the processes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, help="another checkout, whose gateway is measured beside this tree's")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--gateways", type=int, nargs="+", default=[1], help="how many share the streams; 1 among them")
    parser.add_argument("--each", action="store_true", help="every gateway has --streams, in place of a share of them")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--rate", type=float, default=20.0, help="tokens a second of each stream")
    parser.add_argument("--tokens", type=int, default=100, help="of each stream in a window")
    parser.add_argument("--api", choices=("both", "grpc", "sse"), default="both")
    parser.add_argument("--role", default="measure", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--pid", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role == "measure":
        with tempfile.TemporaryDirectory() as folder:
            measure(options, Path(folder))
        return
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        if options.role == "client":
            runner.run(read_streams(options))
        else:
            runner.run(serve_bare(options.role.removeprefix("bare-"), options.port, options.rate))


if __name__ == "__main__":
    main()
