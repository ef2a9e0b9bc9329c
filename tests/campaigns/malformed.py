"""Malformed inputs over HTTP, WebSocket and gRPC: nothing crashes, neighbours are served, memory stays flat.

    make deep PARTS=malformed ARGS="--count 1000000 --seed 1"

A real gateway and a real Redis, with engines without a model. Inputs are grammar-aware changes of valid ones, and bytes
that are of no protocol; each is derived from the seed and a number, so that a run can be repeated, and one batch alone
(`--only NUMBER`). Ctrl-C ends a run early, with its report. Meanwhile a client asks for answers, and another reads
streams of 20 tokens a second: both know what they have to get.

Wanted: no 5xx but 503, no INTERNAL or UNKNOWN, no hidden request answered, no error in the log, the same process at the
end; open files and threads as at the beginning, no more than BOUND_MIB of memory above that after the warm-up, and no
request left that is neither finished nor owned.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import tempfile
import time
from hashlib import sha256
from pathlib import Path
from statistics import median, quantiles

import httpx
import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from campaigns.malformed_inputs.batches import Outcome
from campaigns.malformed_inputs.inputs import Inputs, Sender, exchange
from campaigns.malformed_inputs.neighbours import Neighbours
from campaigns.malformed_inputs.process import Usage, defects_in, unfinished_requests, usage_of
from pagestream_streams.tasks import cancel
from support.engines import synthetic_engine
from support.processes.part import Part
from support.processes.stack import Gateway, Stack
from support.processes.waiting import wait_until
from support.protocol.token_streams import eventually

ROOT = Path(__file__).resolve().parents[2]
STEADY = "steady"
ADMIN_KEY = "sk-admin"
STEADY_RATE = 20  # tokens a second of a stream
BOUND_MIB = 48.0
BOUND_S = 3.0
FILES = 64  # more than at the beginning: connections to Redis, which are kept
SETTLE_S = 60.0
WRONG_CHARS = 1500  # of each end of a line
ENVIRONMENT = {
    "PAGESTREAM_BROKER__RETENTION_S": "30",  # Redis holds what was accepted; that is not what is measured
    "PAGESTREAM_LIMITS__ENCODING_CACHE_BYTES": str(4 * 1024 * 1024),  # full after the warm-up
    "PAGESTREAM_GATEWAY__ALLOW_RUNTIME_LORA": "true",
    "PAGESTREAM_GATEWAY__ALLOW_MODEL_CHANGES": "true",
}


class Watch:
    """Samples the gateway's process, and prints progress."""

    def __init__(self, pid: int, sender: Sender, report_s: float) -> None:
        self._pid, self._sender, self._report_s = pid, sender, report_s
        self.samples: list[tuple[int, Usage]] = []
        """Inputs so far, and what the process had."""

    async def run(self) -> None:
        """Sample until cancelled."""
        begun = reported = time.monotonic()
        while True:
            self.samples.append((self._sender.tally.num_inputs, usage_of(self._pid)))
            now = time.monotonic()
            if now - reported >= self._report_s:
                reported = now
                count, usage = self.samples[-1]
                failed = self._sender.tally.count(Outcome.FAILED)
                rate = count / (now - begun)
                print(f"{count:,} inputs, {rate:.0f}/s, {usage.resident_mib:.0f} MiB, {failed} failed", flush=True)
            await asyncio.sleep(1.0)

    def resident_mib(self, first: float, last: float) -> float:
        """Return the median of the memory between two parts of the inputs."""
        total = self.samples[-1][0]
        return median(usage.resident_mib for count, usage in self.samples if first * total <= count <= last * total)


async def attack(stack: Stack, gateway: Gateway, options: argparse.Namespace) -> list[str]:
    """Send everything; print what was seen; return what is wrong."""
    pid = gateway.process.pid if gateway.process else 0
    async with httpx.AsyncClient(base_url=gateway.url) as client:
        document = (await client.get("/openapi.json")).json()
    inputs = Inputs(document, synthetic_engine.MODEL, options.seed, ADMIN_KEY)
    if options.only is not None:
        batch = inputs.batch(options.only)
        await exchange(batch, gateway.grpc_port if batch.is_grpc else gateway.http_port)
        print(f"{batch.kind}: {batch.data!r}\n{batch.reader.outcomes()}")
        return defects_in(gateway.log)
    sender = Sender(inputs, gateway.http_port, gateway.grpc_port, connections=options.connections)
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, sender.stop)
    neighbours = Neighbours(gateway.url, synthetic_engine.MODEL, STEADY)
    await sender.send(min(options.count // 10, 2000))
    await eventually(lambda: usage_of(pid).files < options.connections, SETTLE_S)
    before, watch = usage_of(pid), Watch(pid, sender, options.report_s)
    helpers = [asyncio.create_task(neighbours.run()), asyncio.create_task(watch.run())]
    begun = time.monotonic()
    try:
        await sender.send(options.count)
    finally:
        seconds = time.monotonic() - begun
        for helper in helpers:
            await cancel(helper)
    wrong = await leftovers(stack, gateway, pid, before)
    print("\n".join(sender.tally.rows()))
    count = sender.tally.num_inputs
    print(f"{count:,} inputs of seed {options.seed} in {seconds:.0f} s ({count / seconds:.0f} a second)")
    warm_mib, end_mib = watch.resident_mib(0.2, 0.4), watch.resident_mib(0.9, 1.0)
    peak_mib = max(usage.resident_mib for _, usage in watch.samples)
    print(
        f"gateway's memory: {before.resident_mib:.0f} MiB after the first 2,000, {warm_mib:.0f} MiB from 20 to 40 % of "
        f"the inputs, {end_mib:.0f} MiB in the last tenth, at most {peak_mib:.0f} MiB"
    )
    if end_mib > warm_mib + BOUND_MIB:
        wrong.append(f"memory grew by {end_mib - warm_mib:.0f} MiB")
    if sender.tally.count(Outcome.FAILED):
        wrong += ["inputs failed", *sender.failures]
    return wrong + report_neighbours(neighbours)


async def leftovers(stack: Stack, gateway: Gateway, pid: int, before: Usage) -> list[str]:
    """Return what of the inputs is left in the process and in Redis."""
    if not gateway.is_alive() or gateway.process is None or gateway.process.pid != pid:
        return ["the gateway has ended"]

    async def is_settled() -> bool:
        after = usage_of(pid)
        return after.files <= before.files + FILES and not await unfinished_requests(stack.redis_url)

    wrong = []
    try:
        await eventually(is_settled, SETTLE_S)
    except TimeoutError:
        left = await unfinished_requests(stack.redis_url)
        wrong.append(f"left over: {usage_of(pid)} where {before} was, {len(left)} unfinished requests {left[:3]}")
    after = usage_of(pid)
    print(f"open files: {before.files}, then {after.files}; threads: {before.threads}, then {after.threads}")
    async with httpx.AsyncClient(base_url=gateway.url) as client:
        load = (await client.get("/load")).json()["server_load"]
    if load:
        wrong.append(f"{load} answers are still being written")
    return wrong + defects_in(gateway.log)[:10]


def report_neighbours(neighbours: Neighbours) -> list[str]:
    """Print what the callers beside the inputs saw; return what is wrong."""
    wrong = neighbours.errors[:5]
    for what, seconds in (("answers", neighbours.answers_s), ("gaps in streams", neighbours.gaps_s)):
        if len(seconds) < 2:
            continue
        cuts = quantiles(seconds, n=100)
        print(f"{len(seconds)} {what}: p50 {cuts[49]:.3f} s, p99 {cuts[98]:.3f} s, longest {max(seconds):.3f} s")
        if max(seconds) > BOUND_S:
            wrong.append(f"{what} took {max(seconds):.1f} s")
    print(f"{neighbours.num_streams} streams ended with the right text, {len(neighbours.errors)} wrong answers")
    return wrong


def run(options: argparse.Namespace, folder: Path) -> int:
    """Start all processes and attack. Returns 1 where something is wrong."""
    os.environ.update(ENVIRONMENT)
    stack = Stack(folder, model=Path(), engine_options=())
    paths = os.pathsep.join(filter(None, (str(ROOT / "tests"), os.environ.get("PYTHONPATH", ""))))
    engine = [sys.executable, "-m", "support.engines.synthetic_engine", "--redis", stack.redis_url, "--report-s", "60"]
    fast = [*engine, "--rate", "100000", "--max-model-len", "64"]
    steady = [*engine, "--name", STEADY, "--rate", str(STEADY_RATE)]
    engines = [
        Part(name, command, folder / f"{name}.log", {"PYTHONPATH": paths})
        for name, command in (("fast", fast), (STEADY, steady))
    ]
    try:
        stack.redis.start()
        for each in engines:
            each.start()
        for each in engines:
            wait_until(each.has_said_ready, limit_s=30, what=each.name)
        keys = folder / "admin-keys"
        keys.write_text(f"{sha256(ADMIN_KEY.encode()).hexdigest()} root\n")
        gateway = stack.add_gateway("--log-level", "WARNING", "--admin-keys", str(keys))
        wait_until(gateway.has_become_ready, limit_s=30, what="gateway")
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            try:
                wrong = runner.run(attack(stack, gateway, options))
            except* OSError as errors:
                status = gateway.process.poll() if gateway.process else None
                wrong = [f"{errors.exceptions[0]!r}; the gateway's exit status is {status}", gateway.log_tail()]
    finally:
        for part in (*engines, *stack.parts):
            part.stop()
    for each in wrong:
        print(f"WRONG: {each if len(each) < 2 * WRONG_CHARS else each[:WRONG_CHARS] + ' ... ' + each[-WRONG_CHARS:]}")
    print(f"as it should be: {'NO' if wrong else 'yes'} ({os.cpu_count()} cores)")
    return 1 if wrong else 0


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=20_000, help="inputs")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--connections", type=int, default=64, help="open at once")
    parser.add_argument("--only", type=int, help="send this batch alone, and print it")
    parser.add_argument("--report-s", type=float, default=30.0, help="seconds between two lines of progress")
    with tempfile.TemporaryDirectory() as folder:
        return run(parser.parse_args(), Path(folder))


if __name__ == "__main__":
    sys.exit(main())
