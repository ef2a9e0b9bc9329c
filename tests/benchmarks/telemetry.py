"""The cost of telemetry: the same requests through two deployments, one that exports nothing and one that exports all.

Both run at once, each with its own Redis, gateway and engine process, and take the requests in turn. The second exports
metrics and every span to a collector (otelcol where it is on the PATH, else a server that accepts everything), and its
metrics are scraped every two seconds. Of each round: wall time, and the processor seconds of gateway and engine.

    PYTHONPATH=tests python tests/benchmarks/telemetry.py [--short] [--repeats 5] [--step-ms MS] [--json FILE]

With `--step-ms` a step of the model takes this long and no processor time: telemetry is then compared with the path
alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import perf_counter

import grpc
import httpx
from engine_throughput import make_model, make_prompts
from full_path import ENGINE_FLAGS, add_tokenizer, due_times, run_full_path
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceResponse
from support.engines.paced_worker import PACE
from support.processes.stack import Stack, free_port, running_stack
from support.processes.waiting import children_of
from support.telemetry.collector import find_collector, running_collector

SCRAPE_S = 2.0
ENDPOINT = "PAGESTREAM_TELEMETRY__OTLP_ENDPOINT"


@dataclass(frozen=True)
class Round:
    """The figures of running all requests once."""

    wall_s: float
    engine_cpu_s: float
    gateway_cpu_s: float

    @property
    def cpu_s(self) -> float:
        """Processor seconds of engine and gateway."""
        return self.engine_cpu_s + self.gateway_cpu_s


def cpu_s(pid: int) -> float:
    """Return the processor seconds of a process and its children so far, with all threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    own = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return own + sum(map(cpu_s, children_of(pid)))


def pids(stack: Stack) -> tuple[int, int]:
    """Process ids of engine and gateway."""
    processes = stack.engines[0].process, stack.gateways[0].process
    return tuple(process.pid for process in processes if process is not None)  # type: ignore[return-value]


def run_round(stack: Stack, prompts: Sequence[Sequence[int]], output_tokens: int) -> Round:
    """Run all requests at once."""
    engine, gateway = pids(stack)
    before = cpu_s(engine), cpu_s(gateway)
    started = perf_counter()
    asyncio.run(run_full_path(stack.gateways[0].grpc_target, prompts, output_tokens, due_times(len(prompts), None)))
    wall_s = perf_counter() - started
    return Round(round(wall_s, 3), round(cpu_s(engine) - before[0], 2), round(cpu_s(gateway) - before[1], 2))


class _AcceptAll(grpc.GenericRpcHandler):
    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes]:
        # The answers of both services are empty messages.
        empty = ExportMetricsServiceResponse().SerializeToString()
        return grpc.unary_unary_rpc_method_handler(lambda _request, _context: empty)


@contextmanager
def endpoint(folder: Path) -> Iterator[str]:
    """Run a collector; yield its endpoint."""
    if find_collector() is not None:
        with running_collector(folder) as collector:
            yield collector.endpoint
        return
    server, port = grpc.server(ThreadPoolExecutor(2), handlers=[_AcceptAll()]), free_port()
    server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.stop(None)


@contextmanager
def scraped(urls: Sequence[str]) -> Iterator[None]:
    """Scrape the metrics as Prometheus does until the block ends."""
    ending = threading.Event()

    def scrape() -> None:
        while not ending.wait(SCRAPE_S):
            for url in urls:
                httpx.get(url, timeout=10.0).raise_for_status()

    thread = threading.Thread(target=scrape)
    thread.start()
    try:
        yield
    finally:
        ending.set()
        thread.join()


@contextmanager
def deployments(options: argparse.Namespace, folder: Path) -> Iterator[tuple[Stack, Stack]]:
    """Run a deployment that exports nothing and one that exports all."""
    model = make_model(folder / "model", "bfloat16")
    add_tokenizer(model)
    module = "pagestream_worker"
    if options.step_ms is not None:
        module, os.environ[PACE] = "support.engines.paced_worker", str(options.step_ms / 1000)
    port = free_port()

    def stack(name: str, *flags: str) -> Stack:
        running = running_stack(
            folder / name, model=model, engine_options=(*ENGINE_FLAGS, *flags), engine_threads=1, engine_module=module
        )
        return contexts.enter_context(running)

    with ExitStack() as contexts:
        os.environ.pop(ENDPOINT, None)
        off = stack("off")
        os.environ[ENDPOINT] = contexts.enter_context(endpoint(folder / "collector"))
        on = stack("on", "--metrics-port", str(port))
        contexts.enter_context(scraped([f"http://127.0.0.1:{port}/metrics", f"{on.gateways[0].url}/metrics"]))
        yield off, on


def measure(options: argparse.Namespace, folder: Path) -> tuple[list[Round], list[Round]]:
    """Run both in turn, in alternating order."""
    num_requests, output_tokens = (16, 16) if options.short else (64, 64)
    prompts = make_prompts(num_requests)
    rounds: dict[Stack, list[Round]] = {}
    with deployments(options, folder) as (off, on):
        for stack in (off, on):
            run_round(stack, prompts, output_tokens)
            rounds[stack] = []
        for number in range(options.repeats):
            for stack in (off, on) if number % 2 else (on, off):
                rounds[stack].append(run_round(stack, prompts, output_tokens))
        return rounds[off], rounds[on]


def compared(off: Sequence[float], on: Sequence[float]) -> str:
    """Return the medians of both and of the ratio in each pair of rounds."""
    ratios = [after / before for before, after in zip(off, on, strict=True)]
    spread = f"{min(ratios) - 1:+.1%} to {max(ratios) - 1:+.1%}"
    return f"{median(off):.2f} s off, {median(on):.2f} s on: {median(ratios) - 1:+.2%} ({spread} by pair)"


def main() -> None:
    """Print the figures side by side."""
    parser = argparse.ArgumentParser(description="Telemetry on against off.")
    parser.add_argument("--short", action="store_true", help="a quarter of the requests and tokens")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--step-ms", type=float, metavar="MS", help="step time of a model without processor time")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        off, on = measure(options, Path(folder))
    for name, figure in (
        ("wall time", lambda each: each.wall_s),
        ("processor time of engine and gateway", lambda each: each.cpu_s),
        ("of the engine", lambda each: each.engine_cpu_s),
        ("of the gateway", lambda each: each.gateway_cpu_s),
    ):
        print(f"{name}: {compared([figure(each) for each in off], [figure(each) for each in on])}")
    if options.json is not None:
        figures = {"off": [asdict(each) for each in off], "on": [asdict(each) for each in on]}
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
