"""Memory of one gateway process: clients that stop reading, and large answers that are not streamed.

    PYTHONPATH=tests python tests/campaigns/gateway_memory.py [--readers 1000] [--answers 10]

A real gateway and a real Redis; an engine without a model writes the logs (`campaigns/bulk_engine.py`). Printed
is the most memory that the gateway's process has ever had (VmHWM). Every answer that is read is compared with its log.
"""

import argparse
import asyncio
import os
import sys
import tempfile
import time
from pathlib import Path

import httpx
import redis.asyncio
from campaigns.bulk_engine import MODEL, token_text
from campaigns.stalled_readers import StalledReader, peak_mib
from support.processes.part import Part
from support.processes.stack import Gateway, Stack
from support.processes.waiting import wait_until
from support.protocol.token_streams import eventually

ROOT = Path(__file__).resolve().parents[2]
BOUND_MIB = 512
LIMIT_S = 2400.0
CONNECT_AT_ONCE = 50
NUM_READ_ON = 20  # of the stalled readers, at the end


async def finished_requests(redis_url: str) -> int:
    """Return the number of logs that have ended: their keys expire."""
    async with redis.asyncio.Redis.from_url(redis_url) as client:
        names = [name async for name in client.scan_iter("*:log:*", count=1000)]
        return sum([int(await client.ttl(name)) > 0 for name in names])


async def stalled_readers(stack: Stack, gateway: Gateway, options: argparse.Namespace) -> str:
    """Open all readers, wait until their logs are complete, let some read on; return what was seen."""
    readers = [StalledReader(gateway, number, options.tokens) for number in range(options.readers)]
    begun = time.monotonic()
    try:
        for first in range(0, len(readers), CONNECT_AT_ONCE):
            await asyncio.gather(*(reader.open() for reader in readers[first : first + CONNECT_AT_ONCE]))

        async def all_are_finished() -> bool:
            return await finished_requests(stack.redis_url) == len(readers)

        await eventually(all_are_finished, LIMIT_S)
        stalled_mib = peak_mib(gateway)
        async with asyncio.timeout(LIMIT_S):
            await asyncio.gather(*(reader.rest() for reader in readers[:NUM_READ_ON]))
    finally:
        for reader in readers:
            reader.close()
    return (
        f"{len(readers)} stalled readers of {options.tokens} tokens with 20 log probabilities: {stalled_mib:.0f} MiB, "
        f"{min(NUM_READ_ON, len(readers))} read on: {peak_mib(gateway):.0f} MiB ({time.monotonic() - begun:.0f} s)"
    )


async def whole_answers(gateway: Gateway, options: argparse.Namespace) -> str:
    """Ask for all answers at once, and compare them; return what was seen."""
    asked = {"model": MODEL, "prompt": "x", "max_tokens": options.answer_tokens, "n": options.choices}
    expected = "".join(map(token_text, range(options.answer_tokens)))
    begun = time.monotonic()

    async def answer(client: httpx.AsyncClient) -> int:
        response = await client.post("/v1/completions", json={**asked, "ignore_eos": True})
        response.raise_for_status()
        if [choice["text"] for choice in response.json()["choices"]] != [expected] * options.choices:
            raise RuntimeError("an answer differs from its log")
        return len(response.content)

    async with httpx.AsyncClient(base_url=gateway.url, timeout=LIMIT_S) as client:
        sizes = await asyncio.gather(*(answer(client) for _ in range(options.answers)))
    return (
        f"{options.answers} answers of n={options.choices} x {options.answer_tokens} tokens, {sizes[0] / 1e6:.1f} MB "
        f"each: {peak_mib(gateway):.0f} MiB ({time.monotonic() - begun:.0f} s)"
    )


async def run(options: argparse.Namespace, folder: Path) -> int:
    """Run both parts, each with a fresh gateway. Returns 1 where a bound is exceeded."""
    stack = Stack(folder, model=Path(), engine_options=())
    command = [sys.executable, "-m", "campaigns.bulk_engine", "--redis", stack.redis_url]
    engine = Part("engine", command, folder / "engine.log", {"PYTHONPATH": str(ROOT / "tests")})
    within = True
    try:
        stack.redis.start()
        engine.start()
        wait_until(engine.has_said_ready, limit_s=30, what="engine")
        for number, is_wanted in enumerate((options.readers, options.answers)):
            if not is_wanted:
                continue
            gateway = stack.add_gateway()
            wait_until(gateway.is_ready, limit_s=30, what="gateway")
            idle_mib = peak_mib(gateway)
            if number == 0:
                seen = await stalled_readers(stack, gateway, options)
            else:
                seen = await whole_answers(gateway, options)
            print(f"idle {idle_mib:.0f} MiB; {seen}", flush=True)
            within = within and peak_mib(gateway) <= BOUND_MIB
            gateway.stop()
    finally:
        for part in (engine, *stack.parts):
            part.stop()
    print(f"within {BOUND_MIB} MiB: {'yes' if within else 'NO'} ({os.cpu_count()} cores)")
    return 0 if within else 1


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--readers", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=256, help="of each stalled stream")
    parser.add_argument("--answers", type=int, default=10)
    parser.add_argument("--choices", type=int, default=128)
    parser.add_argument("--answer-tokens", type=int, default=4096, help="of each choice")
    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(run(parser.parse_args(), Path(folder)))


if __name__ == "__main__":
    sys.exit(main())
