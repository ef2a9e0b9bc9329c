"""An attack on one gateway process while 64 streams run: none of them waits over a second, memory stays below 512 MiB.

    PYTHONPATH=tests python tests/campaigns/gateway_attack.py

The attack, all at once: connections that send a header byte by byte, headers of 64 MiB, prompts of 7 MiB, a thousand
clients that stop reading streams with 20 log probabilities, ten answers of n=128 x 4,096 tokens that are not streamed.
The gateway has its default settings, which are the chart's. Streams and attack have client processes and engines of
their own; the attack's run at a lower priority, since they stand for other machines. Printed are what the streams saw,
how each attack ended, and the most memory that the gateway has had.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import quantiles

import httpx
import uvloop
from campaigns import bulk_engine
from campaigns.stalled_readers import StalledReader, peak_mib
from support.engines import synthetic_engine
from support.processes.part import Part
from support.processes.stack import Gateway, Stack
from support.processes.waiting import wait_until
from support.protocol.token_streams import eventually

ROOT = Path(__file__).resolve().parents[2]
BOUND_MIB = 512
BOUND_S = 1.0
LIMIT_S = 2400.0
RATE = 5.0  # tokens a second of each stream
SLOW_HEADER_BYTE_S = 1.0
HUGE_HEADER_BYTES = 64 * 1024 * 1024
LARGE_PROMPT_BYTES = 7 * 1024 * 1024
STALLED_TOKENS = 256
CHOICES = 128
READY = "streaming"


# -- the streams, in a process of their own --


class Arrivals:
    """The arrivals of all streams."""

    def __init__(self) -> None:
        self.gaps_s: list[float] = []
        self.errors: list[str] = []
        self.begun = 0

    async def stream(self, port: int, number: int) -> None:
        """Read one stream until cancelled; its tokens come at RATE."""
        prompt = [10 + number % 26, 10 + number // 26]
        asked = {"model": synthetic_engine.MODEL, "prompt": prompt, "max_tokens": 4000, "stream": True}
        body = json.dumps(asked | {"ignore_eos": True})
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(body)}"
        writer.write(f"{head}\r\n\r\n{body}".encode())
        last: float | None = None
        try:
            while data := await reader.read(65536):
                if b'"text"' not in data:
                    continue
                now = time.perf_counter()
                if last is None:
                    self.begun += 1
                else:
                    self.gaps_s.append(now - last)
                last = now
            self.errors.append(f"stream {number} ended")
        finally:
            if last is not None:  # a gap that is still open counts
                self.gaps_s.append(time.perf_counter() - last)
            writer.close()


async def run_streams(options: argparse.Namespace) -> None:
    """Read all streams: until a line comes there is no attack, until standard input ends there is one."""
    arrivals = Arrivals()
    tasks = [asyncio.create_task(arrivals.stream(options.port, number)) for number in range(options.streams)]
    await eventually(lambda: arrivals.begun == len(tasks), LIMIT_S)
    arrivals.gaps_s.clear()
    print(READY, flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    calm_s, arrivals.gaps_s = arrivals.gaps_s, []
    await asyncio.to_thread(sys.stdin.read)
    for task in tasks:
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, Exception):
            arrivals.errors.append(repr(result))
    print(json.dumps({"calm_s": calm_s, "gaps_s": arrivals.gaps_s, "errors": arrivals.errors}))


# -- the attack --


async def slow_header(port: int, until: asyncio.Event) -> str:
    """Send a header byte by byte, on a new connection whenever the gateway has had enough. Returns its last answer."""
    answer = b""
    while not until.is_set():
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        reading = asyncio.create_task(reader.read(4096))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX-Slow: ")
        while not reading.done() and not until.is_set():
            writer.write(b"a")
            await asyncio.wait({reading}, timeout=SLOW_HEADER_BYTE_S)
        if reading.done():
            answer = reading.result() if reading.exception() is None else b""
        reading.cancel()
        writer.close()
    return _status(answer)


async def huge_header(port: int) -> str:
    """Send one header of 64 MiB; return the answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    reading = asyncio.create_task(reader.read(4096))
    piece = b"a" * 65536
    try:
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX-Huge: ")
        for _ in range(HUGE_HEADER_BYTES // len(piece)):
            writer.write(piece)
            await writer.drain()
            if reading.done():
                break
        return _status(await reading)
    except ConnectionError:
        return "closed"
    finally:
        reading.cancel()
        writer.close()


async def large_prompt(client: httpx.AsyncClient) -> str:
    """Send a prompt of 7 MiB to a model with a context of 4,096 tokens; return the answer."""
    asked = {"model": synthetic_engine.MODEL, "prompt": "word " * (LARGE_PROMPT_BYTES // 5), "max_tokens": 1}
    try:
        response = await client.post("/v1/completions", json=asked)
    except httpx.HTTPError as error:
        return type(error).__name__
    return str(response.status_code)


async def whole_answer(client: httpx.AsyncClient, tokens: int) -> str:
    """Ask for an answer with all choices; return whether it is right."""
    asked = {"model": bulk_engine.MODEL, "prompt": "x", "max_tokens": tokens, "n": CHOICES, "ignore_eos": True}
    response = await client.post("/v1/completions", json=asked)
    if response.status_code != httpx.codes.OK:
        return str(response.status_code)
    expected = "".join(map(bulk_engine.token_text, range(tokens)))
    return "right" if [each["text"] for each in response.json()["choices"]] == [expected] * CHOICES else "wrong"


async def stalled_reader(reader: StalledReader, until: asyncio.Event) -> str:
    """Hold a stream without reading it."""
    try:
        await reader.open()
        await until.wait()
    except (OSError, RuntimeError) as error:
        return str(error)[:60]
    finally:
        reader.close()
    return "held"


async def attack(gateway: Gateway, options: argparse.Namespace) -> dict[str, Counter[str]]:
    """Do everything at once, until the answers are complete; return how each part ended."""
    port, over = gateway.http_port, asyncio.Event()
    readers = [StalledReader(gateway, number, STALLED_TOKENS) for number in range(options.readers)]
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=gateway.url, timeout=LIMIT_S, limits=limits) as client:

        async def waves(make: Callable[[], Awaitable[str]], count: int) -> Counter[str]:
            return Counter(await asyncio.gather(*(make() for _ in range(count))))

        async with asyncio.TaskGroup() as tasks:
            parts = {
                "slow headers": tasks.create_task(waves(lambda: slow_header(port, over), options.slow_headers)),
                "huge headers": tasks.create_task(waves(lambda: huge_header(port), options.huge_headers)),
                "large prompts": tasks.create_task(waves(lambda: large_prompt(client), options.large_prompts)),
                "stalled readers": tasks.create_task(
                    waves(lambda: stalled_reader(readers.pop(), over), options.readers)
                ),
                "answers": tasks.create_task(
                    waves(lambda: whole_answer(client, options.answer_tokens), options.answers)
                ),
            }
            ending = [parts[name] for name in ("huge headers", "large prompts", "answers")]
            await asyncio.wait(ending, timeout=LIMIT_S)
            await asyncio.sleep(options.least_s)
            over.set()
    return {name: part.result() for name, part in parts.items()}


def _status(answer: bytes) -> str:
    return answer.split(b" ", 2)[1].decode() if answer.startswith(b"HTTP/") else "closed"


# -- both --


def _nice(command: list[str]) -> list[str]:
    return ["nice", "-n", "15", *command]


async def run(options: argparse.Namespace, folder: Path) -> int:
    """Start all processes, attack, and print what was seen. Returns 1 where a bound is exceeded."""
    stack = Stack(folder, model=Path(), engine_options=())
    python = {"PYTHONPATH": str(ROOT / "tests")}
    steady = [sys.executable, "-m", "support.engines.synthetic_engine", "--redis", stack.redis_url, "--rate", str(RATE)]
    bulk = _nice([sys.executable, "-m", "campaigns.bulk_engine", "--redis", stack.redis_url])
    engines = [Part("steady", steady, folder / "steady.log", python), Part("bulk", bulk, folder / "bulk.log", python)]
    try:
        stack.redis.start()
        for engine in engines:
            engine.start()
            wait_until(engine.has_said_ready, limit_s=30, what=engine.name)
        gateway = stack.add_gateway()
        wait_until(gateway.is_ready, limit_s=30, what="gateway")
        idle_mib = peak_mib(gateway)
        streams = await asyncio.create_subprocess_exec(
            *(sys.executable, __file__, "--role", "streams", "--port", str(gateway.http_port)),
            *("--streams", str(options.streams)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=2**26,
        )
        if streams.stdin is None or streams.stdout is None:
            raise RuntimeError("the streams have no pipes")
        if (await streams.stdout.readline()).decode().strip() != READY:
            raise RuntimeError("the streams have not begun")
        await asyncio.sleep(options.calm_s)
        streams.stdin.write(b"attack\n")
        os.nice(15)  # this process is the attacker
        begun = time.monotonic()
        ended = await attack(gateway, options)
        seconds = time.monotonic() - begun
        streams.stdin.close()
        seen = json.loads(await streams.stdout.read())
        await streams.wait()
        used_mib = peak_mib(gateway)
    finally:
        for part in (*engines, *stack.parts):
            part.stop()
    print(f"{options.streams} streams at {RATE:g} tokens a second, {seconds:.0f} s of attack, {os.cpu_count()} cores")
    for name, outcomes in ended.items():
        print(f"{name}: {', '.join(f'{count} {what}' for what, count in outcomes.most_common())}")
    print(f"gateway's memory: idle {idle_mib:.0f} MiB, at most {used_mib:.0f} MiB")
    is_smooth = report(seen)
    is_within = is_smooth and used_mib <= BOUND_MIB
    print(f"within {BOUND_S:g} s and {BOUND_MIB} MiB: {'yes' if is_within else 'NO'}")
    return 0 if is_within else 1


def report(seen: dict[str, list[float]]) -> bool:
    """Print what the streams saw; return whether it is within its bound."""
    for when, gaps_s in (("before the attack", seen["calm_s"]), ("under attack", seen["gaps_s"])):
        cuts = quantiles(gaps_s, n=1000)
        print(
            f"between two tokens {when}: p50 {cuts[499]:.3f} s, p99 {cuts[989]:.3f} s, p99.9 {cuts[998]:.3f} s, "
            f"longest {max(gaps_s):.3f} s"
        )
    print(f"{len(seen['errors'])} errors {seen['errors'][:3]}")
    return max(seen["gaps_s"]) <= BOUND_S and not seen["errors"]


def main() -> int:
    """Run the attack, or as the process of the streams."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--slow-headers", type=int, default=256)
    parser.add_argument("--huge-headers", type=int, default=64)
    parser.add_argument("--large-prompts", type=int, default=32)
    parser.add_argument("--readers", type=int, default=1000)
    parser.add_argument("--answers", type=int, default=10)
    parser.add_argument("--answer-tokens", type=int, default=4096, help="of each of 128 choices")
    parser.add_argument("--calm-s", type=float, default=30.0, help="seconds without an attack, for comparison")
    parser.add_argument("--least-s", type=float, default=15.0, help="seconds that it goes on after the last answer")
    parser.add_argument("--role", choices=("attack", "streams"), default="attack", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        if options.role == "streams":
            runner.run(run_streams(options))
            return 0
        with tempfile.TemporaryDirectory() as folder:
            return runner.run(run(options, Path(folder)))


if __name__ == "__main__":
    sys.exit(main())
