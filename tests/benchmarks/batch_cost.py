"""What a batch costs: the upload, the check of its lines, its jobs; and what it keeps of Redis' memory.

    python tests/benchmarks/batch_cost.py --jobs 2000

One process has the gateway, an engine that answers at once, and a client. `loop_ms` is the longest time for which the
event loop was held up while lines were checked; `idle_loop_ms` is the same while nothing happens.
"""

import argparse
import asyncio
import dataclasses
import json
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path

import httpx
from pagestream_gateway.settings import BatchSettings
from redis.asyncio import Redis
from support.clients.gateway_clients import gateway_settings, running_address
from support.engines.synthetic_engine import MODEL, running_engine
from support.redis.servers import running_server

_TICK_S = 0.002


@asynccontextmanager
async def longest_hold() -> AsyncIterator[list[float]]:
    """Give a list whose one number is, after the block, the most milliseconds by which a tick was late."""
    found = [0.0]

    async def tick() -> None:
        while True:
            began = time.perf_counter()
            await asyncio.sleep(_TICK_S)
            found[0] = max(found[0], 1000 * (time.perf_counter() - began - _TICK_S))

    task = asyncio.create_task(tick())
    try:
        yield found
    finally:
        task.cancel()


async def measure(redis_url: str, num_jobs: int) -> dict[str, float]:
    """Run one batch."""
    said = "Tell me a story about a lighthouse. " * 3
    lines = [
        {"custom_id": f"job-{number}", "body": {"model": MODEL, "prompt": said, "max_tokens": 8}}
        for number in range(num_jobs)
    ]
    text = "\n".join(map(json.dumps, lines)).encode()
    settings = dataclasses.replace(gateway_settings(redis_url), batches=BatchSettings())
    async with (
        running_engine(redis_url),
        running_address(settings) as address,
        httpx.AsyncClient(base_url=address.url, timeout=60.0) as client,
        Redis.from_url(redis_url) as redis,
    ):
        async with longest_hold() as idle:
            await asyncio.sleep(1.0)
        times = [time.perf_counter()]
        made = await client.post("/v1/files", files={"file": text}, data={"purpose": "batch"})
        times.append(time.perf_counter())
        body = {"input_file_id": made.json()["id"], "endpoint": "/v1/completions"}
        batch = (await client.post("/v1/batches", json=body)).json()
        async with longest_hold() as held:
            while batch["status"] == "validating":
                batch = (await client.get(f"/v1/batches/{batch['id']}")).json()
                await asyncio.sleep(0.02)
        times.append(time.perf_counter())
        most = 0
        while batch["status"] not in ("completed", "failed"):
            most = max(most, (await redis.info("memory"))["used_memory"])
            batch = (await client.get(f"/v1/batches/{batch['id']}")).json()
            await asyncio.sleep(0.2)
        times.append(time.perf_counter())
        output = (await client.get(f"/v1/files/{batch['output_file_id']}")).json()["bytes"]
    upload_s, check_s, run_s = (after - before for before, after in pairwise(times))
    return {
        "jobs": batch["request_counts"]["completed"],
        "input_mb": len(text) / 1e6,
        "output_mb": output / 1e6,
        "upload_s": round(upload_s, 3),
        "check_ms_per_job": round(1000 * check_s / num_jobs, 3),
        "loop_ms": round(held[0], 1),
        "idle_loop_ms": round(idle[0], 1),
        "jobs_per_s": round(num_jobs / run_s, 1),
        "redis_mb_most": round(most / 1e6, 1),
    }


def main() -> None:
    """Print a line of JSON."""
    parser = argparse.ArgumentParser(description="The cost of a batch.")
    parser.add_argument("--jobs", type=int, default=2000)
    with tempfile.TemporaryDirectory() as folder, running_server(Path(folder)) as server:
        print(json.dumps(asyncio.run(measure(server.url, parser.parse_args().jobs))))


if __name__ == "__main__":
    main()
