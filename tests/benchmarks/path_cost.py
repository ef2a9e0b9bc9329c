"""What one token costs on its way from the engine's step to the client, by stage, and the floor of each stage.

A real gateway, Redis, worker and engine process, whose model takes a fixed time a step and no processor
(`support/engines/paced_worker.py`), serve 1 to 1,000 streams at once. Of each number of streams there are three runs:

- **processor**: the time of all threads of each process, from the kernel's counters, without what the process uses
  while it serves nothing. Nothing watches.
- **samples**: each millisecond of processor time is added to the function that used it, which divides a process' figure
  into stages.
- **waits**: times at which a step ends, its append begins, Redis has answered, the gateway's wake-up comes, and the
  client has the step's tokens. A wait is the median over the steps; it ends when the last stream has its token.

Floors: a pipe, a plain XADD and a bare `write` to a socket, with as many bytes as often.

    PYTHONPATH=tests python tests/benchmarks/path_cost.py [--streams 1 16 64 256 1000] [--api grpc|sse]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import platform
import socket
import sys
import tempfile
import threading
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import grpc.aio
import psutil
import uvloop
from engine_throughput import make_model
from full_path import add_tokenizer
from gateway_streams import ClientFigures, grpc_stream, sse_stream
from goals import print_goal
from pagestream.v1.inference_pb2_grpc import InferenceStub
from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from support.engines.paced_worker import PACE
from support.engines.synthetic_engine import MODEL
from support.processes.part import Part
from support.processes.stack import Stack
from support.processes.waiting import wait_until

HERE = Path(__file__).resolve().parent
STAGES = "PAGESTREAM_STAGES"
WARM_TOKENS = 10  # of each stream, before anything counts
IDLE_S = 3.0
LIMIT_S = 300.0
PROCESSES = ("engine", "worker", "redis", "gateway")
STEP_S = {1: 0.02, 16: 0.02, 64: 0.05, 256: 0.15, 1000: 0.6}
"""A step's time by streams: what leaves the path less than half of two cores."""
STAGE_OF = (
    ("engine", "pagestream_engine/wire", "report"),
    ("engine", "pagestream_engine", "engine step"),
    ("engine", "pagestream_worker", "report"),
    ("worker", "pagestream_streams", "append"),
    ("worker", "redis", "append"),
    ("worker", "pagestream_worker", "worker"),
    ("gateway", "pagestream_streams", "wake-up"),
    ("gateway", "redis", "wake-up"),
    ("gateway", "pagestream_gateway", "gateway"),
    ("gateway", "uvicorn", "socket"),
    ("gateway", "httptools", "socket"),
    ("gateway", "grpc", "socket"),
)
"""Process, part of a file's path, stage; what nothing here names is the process' loop."""
GOALS_US = {1: 250.0, 64: 75.0}
"""Processor time of one token in all processes."""


@dataclass
class Figures:
    """Of one number of streams."""

    streams: int
    step_s: float
    processor_us: dict[str, float] = field(default_factory=dict)
    """By process, a token."""
    idle_ms: dict[str, float] = field(default_factory=dict)
    """By process, a second without a request."""
    stage_us: dict[str, float] = field(default_factory=dict)
    """By "process: stage", a token."""
    waits_ms: dict[str, float] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)


def cpu_ns(pid: int) -> int:
    """Return the processor time of all threads of a process."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks)


class Serving:
    """A stack with one gateway and one engine, and the ids of its processes."""

    def __init__(self, folder: Path, model: Path, streams: int, step_s: float) -> None:
        self.watched = folder / "stages"
        self.watched.mkdir(parents=True)
        os.environ[PACE], os.environ[STAGES] = str(step_s), str(self.watched)
        options = ("--max-num-seqs", str(streams), "--no-enable-prefix-caching", "--max-model-len", "1024")
        options = (*options, "--served-model-name", MODEL)  # the name that `gateway_streams.py` asks for
        module = "support.engines.paced_worker"
        self.stack = Stack(folder, model=model, engine_options=options, engine_module=module)

    def start(self) -> dict[str, int]:
        """Start all; return ids by name."""
        self.stack.redis.start()
        worker = self.stack.add_engine()
        gateway = self.stack.add_gateway()
        self.stack.wait_ready()
        [engine] = psutil.Process(worker.pid).children(recursive=True)
        return {"engine": engine.pid, "worker": worker.pid, "redis": self.stack.redis.pid, "gateway": gateway.pid}

    def seen(self, pids: Mapping[str, int], name: str) -> dict[str, Any]:
        """Return what a process has seen, after `off`."""
        file = self.watched / f"{pids[name]}.json"
        wait_until(file.exists, what=f"{name}'s record")
        return dict(json.loads(file.read_text()))


async def read_streams(
    serving: Serving, pids: Mapping[str, int], options: argparse.Namespace, streams: int, kind: str
) -> tuple[float, dict[str, float], list[float], list[str]]:
    """Read `streams` streams to their ends.

    Returns: seconds of the window, microseconds of processor a token by process, times at which the last stream had a
    token of a step, errors.
    """
    figures = ClientFigures(streams)
    given = argparse.Namespace(tokens=options.tokens)
    gateway = serving.stack.gateways[0]
    arrivals: list[float] = []
    async with grpc.aio.insecure_channel(gateway.grpc_target) as channel:
        stub = InferenceStub(channel)
        tasks = [
            asyncio.create_task(
                grpc_stream(stub, number, given, figures)
                if options.api == "grpc"
                else sse_stream(gateway.http_port, number, given, figures)
            )
            for number in range(streams)
        ]
        marks: list[tuple[int, float, dict[str, int]]] = []
        for bound in (WARM_TOKENS, options.tokens - WARM_TOKENS):
            while figures.tokens < bound * streams and any(not task.done() for task in tasks):
                before = figures.tokens
                await asyncio.sleep(0.0005 if kind == "stamp" else 0.01)
                if kind == "stamp" and figures.tokens != before:
                    arrivals.append(time.monotonic())
            spent = {name: cpu_ns(pid) for name, pid in pids.items()}
            marks.append((figures.tokens, time.monotonic(), spent))
            if kind != "processor" and len(marks) == 1:
                (serving.watched / kind).touch()
        if kind != "processor":
            (serving.watched / "off").touch()
        await asyncio.gather(*tasks)
    (tokens, began, before_ns), (later, ended, after_ns) = marks
    count = max(1, later - tokens)
    costs = {name: (after_ns[name] - before_ns[name]) / count / 1e3 for name in pids}
    return (ended - began) / count, costs, arrivals, figures.errors


def run_once(folder: Path, model: Path, options: argparse.Namespace, figures: Figures, kind: str) -> None:
    """Make one of the three runs, and add what it says."""
    serving = Serving(folder, model, figures.streams, figures.step_s)
    try:
        pids = serving.start()
        if kind == "processor":
            figures.idle_ms = idle(pids)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            result = runner.run(read_streams(serving, pids, options, figures.streams, kind))
        a_token_s, costs, arrivals, errors = result
        figures.errors += errors
        if kind == "processor":
            for name, cost in costs.items():
                figures.processor_us[name] = cost - figures.idle_ms[name] * 1e3 * a_token_s
        elif kind == "sample":
            for name in ("engine", "worker", "gateway"):
                figures.stage_us |= divided(name, serving.seen(pids, name), figures.processor_us[name])
        else:
            figures.waits_ms = waits(
                {name: serving.seen(pids, name) for name in PROCESSES if name != "redis"}, arrivals
            )
    finally:
        serving.stack.stop()


def idle(pids: Mapping[str, int]) -> dict[str, float]:
    """Return milliseconds of processor a second that each process uses while it serves nothing."""
    time.sleep(1.0)  # what a start leaves to be done
    before = {name: cpu_ns(pid) for name, pid in pids.items()}
    time.sleep(IDLE_S)
    return {name: (cpu_ns(pid) - before[name]) / 1e6 / IDLE_S for name, pid in pids.items()}


def divided(process: str, seen: Mapping[str, Any], cost_us: float) -> dict[str, float]:
    """Divide a process' time of a token by the samples of its stages."""
    samples = seen["samples"]
    counts: Counter[str] = Counter()
    for place, count in samples.items():
        stage = next((stage for name, part, stage in STAGE_OF if name == process and f"/{part}" in place), "loop")
        counts[f"{process}: {stage}"] += count
    total = max(1, sum(counts.values()))
    return {stage: cost_us * count / total for stage, count in counts.items()}


def waits(seen: Mapping[str, Mapping[str, Any]], arrivals: list[float]) -> dict[str, float]:
    """Return the medians of the waits between a step's end and its arrival, by hop, in milliseconds."""

    def times(process: str, name: str) -> list[tuple[int, int]]:
        stamps = seen[process]["stamps"]
        return [(int(began), int(ended)) for began, ended in stamps.get(name, ())]

    steps = [ended for _, ended in times("engine", "step")]
    appends, wakes = times("worker", "append"), times("gateway", "wake")
    ends = [round(each * 1e9) for each in arrivals]
    hops: dict[str, list[float]] = {}
    for this, following in pairwise(steps):
        begun = [each for each in appends if this <= each[0] < following]
        woken = [began for began, _ in wakes if this <= began < following]
        last = ends[bisect_right(ends, following) - 1] if ends else 0
        if not begun or not woken or last < this:
            continue
        answered = max(ended for _, ended in begun)
        for name, span in (
            ("step's end to append", begun[0][0] - this),
            ("append to Redis' answer", answered - begun[0][0]),
            ("step's end to first wake-up", min(woken) - this),
            ("step's end to last token at the client", last - this),
        ):
            hops.setdefault(name, []).append(span / 1e6)
    return {name: median(spans) for name, spans in hops.items()}


# -- floors --


def pipe_floor_us(num_bytes: int, rounds: int = 5000) -> float:
    """Return microseconds of both processes for one message through a pipe."""
    ours, theirs = multiprocessing.Pipe(duplex=False)
    message = bytes(num_bytes)
    spent = multiprocessing.get_context("fork").Value("d", 0.0)

    def read() -> None:
        for _ in range(rounds):
            ours.recv_bytes()
        spent.value = time.process_time()

    reader = multiprocessing.get_context("fork").Process(target=read)
    reader.start()
    before = time.thread_time()
    for _ in range(rounds):
        theirs.send_bytes(message)
    written = time.thread_time() - before
    reader.join(LIMIT_S)
    return (written + spent.value) / rounds * 1e6


def xadd_floor_us(server: Part, url: str, streams: int, num_bytes: int = 60) -> float:
    """Return microseconds of the server for a plain XADD, as many in a pipeline as a step has streams."""
    with Redis.from_url(url) as client:
        rounds = max(20, 20000 // streams)
        value = bytes(num_bytes)

        def add() -> None:
            pipeline = client.pipeline(transaction=False)
            for number in range(streams):
                pipeline.xadd(f"floor:{number}", {"t": value}, maxlen=1000)
            pipeline.execute()

        add()
        before = cpu_ns(server.pid)
        for _ in range(rounds):
            add()
        return (cpu_ns(server.pid) - before) / 1e3 / rounds / streams


def socket_floor_us(streams: int, num_bytes: int) -> float:
    """Return microseconds of a process for one write to one of so many TCP connections that another thread reads."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
    pairs = []
    for _ in range(streams):
        near = socket.create_connection(listener.getsockname())
        near.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        pairs.append((near, listener.accept()[0]))
    message, rounds = bytes(num_bytes), max(20, 20000 // streams)
    done = threading.Event()

    def drain() -> None:
        for _ in range(rounds):
            for _, far in pairs:
                far.recv(65536)
        done.set()

    reader = threading.Thread(target=drain, daemon=True)
    reader.start()
    before = time.thread_time()
    for _ in range(rounds):
        for near, _ in pairs:
            near.send(message)
    spent = time.thread_time() - before
    for near, _ in pairs:
        near.close()
    done.wait(LIMIT_S)
    for _, far in pairs:
        far.close()
    listener.close()
    return spent / rounds / streams * 1e6


def floors(folder: Path, streams: int, api: str) -> dict[str, float]:
    """Return the floors of report, append and socket, for one token of so many streams."""
    server = Stack(folder, engine_options=())
    server.redis.start()
    try:
        with Redis.from_url(server.redis_url) as client:
            wait_until(lambda: is_there(client), what="Redis")
        added = xadd_floor_us(server.redis, server.redis_url, streams)
    finally:
        server.stop()
    return {
        "a pipe, one message a step": pipe_floor_us(40 * streams) / streams,
        "a plain XADD, a pipeline a step": added,
        "a bare write a token": socket_floor_us(streams, 90 if api == "grpc" else 280),
    }


def is_there(client: Redis) -> bool:
    """Whether the server answers."""
    try:
        return bool(client.ping())
    except RedisConnectionError:
        return False


# -- the table --


def report(all_figures: list[Figures], all_floors: Mapping[int, Mapping[str, float]]) -> None:
    """Print one column for each number of streams."""

    def row(name: str, cell: Callable[[Figures], float | None], digits: int = 1) -> None:
        cells = [cell(each) for each in all_figures]
        shown = " | ".join("-" if value is None else f"{value:,.{digits}f}" for value in cells)
        print(f"| {name} | {shown} |")

    print(f"\n{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    print(f"\n| us of processor a token | {' | '.join(f'{each.streams:,}' for each in all_figures)} |")
    print(f"|---|{'---:|' * len(all_figures)}")
    for name in PROCESSES:
        row(f"**{name}**", lambda each, name=name: each.processor_us.get(name))
        for stage in sorted({key for each in all_figures for key in each.stage_us if key.startswith(f"{name}:")}):
            row(stage, lambda each, stage=stage: each.stage_us.get(stage))
    row("**all**", lambda each: sum(each.processor_us.values()))
    for name in next(iter(all_floors.values())):
        row(f"floor: {name}", lambda each, name=name: all_floors[each.streams][name])
    for name in PROCESSES:
        row(f"idle {name}, ms a second", lambda each, name=name: each.idle_ms.get(name))
    print(f"\n| ms, median over steps | {' | '.join(f'{each.streams:,}' for each in all_figures)} |")
    print(f"|---|{'---:|' * len(all_figures)}")
    for name in dict.fromkeys(key for each in all_figures for key in each.waits_ms):
        row(name, lambda each, name=name: each.waits_ms.get(name), 2)
    for each in all_figures:
        if each.streams in GOALS_US:
            measured = f"{sum(each.processor_us.values()):.0f} us"
            what = f"processor time of a token on its path, {each.streams} streams"
            print_goal(what, f"<= {GOALS_US[each.streams]:.0f} us", measured)


def main() -> int:
    """Measure and print; return 1 where a stream had an error."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 64, 256, 1000])
    parser.add_argument("--tokens", type=int, default=120, help="of each stream")
    parser.add_argument("--api", choices=("grpc", "sse"), default="sse")
    parser.add_argument("--short", action="store_true", help="1 and 64 streams")
    options = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE / "stages"), str(HERE.parent)])
    counts = [1, 64] if options.short else options.streams
    found: list[Figures] = []
    least: dict[int, Mapping[str, float]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = make_model(folder / "model", "bfloat16")
        add_tokenizer(model)
        for streams in counts:
            step_s = next(step for bound, step in sorted(STEP_S.items()) if streams <= bound or bound == max(STEP_S))
            figures = Figures(streams, step_s)
            for kind in ("processor", "sample", "stamp"):
                run_once(folder / f"{streams}-{kind}", model, options, figures, kind)
            least[streams] = floors(folder / f"{streams}-floor", streams, options.api)
            found.append(figures)
            for error, count in Counter(figures.errors).most_common(3):
                print(f"{streams} streams: {count} errors: {error}")
    report(found, least)
    return 1 if any(figures.errors for figures in found) else 0


if __name__ == "__main__":
    sys.exit(main())
