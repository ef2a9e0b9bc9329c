"""A thousand chats at once, over HTTP, to `pagestream serve` with the demo model: errors, TTFT and ITL.

Everything is real and at its defaults: gateway, Redis, worker and engine, each a process; one process is the client.
All streams are opened at the same moment, far more than the engine has seats for, so the time to the first token is
mostly the queue's.

    PYTHONPATH=tests python tests/benchmarks/thousand_streams.py [--streams 1000] [--tokens 64] [-- SERVE OPTIONS]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import quantiles
from typing import Any
from urllib.parse import urlsplit

import uvloop
from goals import print_goal
from support.clients.readers import TOPICS
from support.processes.served import running_serve

LIMIT_S = 1800.0


@dataclass
class StreamRecord:
    """One stream."""

    ttft_s: float | None = None
    """From the start of all, with the connection, to the first text."""
    itl_s: list[float] = field(default_factory=list)
    """Between two arrivals of text."""
    ended_s: float = 0.0
    num_tokens: int = 0
    """By the usage that the server states."""
    finish_reason: str | None = None
    error: str = ""
    """Why it did not end as it should; "" where it did."""


def body_of(model: str, number: int, num_tokens: int) -> dict[str, Any]:
    """Return the body of one chat, each with a prompt of its own."""
    first, second = TOPICS[number % 16], TOPICS[number // 16 % 16]
    prompt = f"Story {number}: tell me about the {first} and the {second}."
    return {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": num_tokens,
        "seed": number,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def open_at_once(url: str, model: str, num_streams: int, num_tokens: int, limit_s: float) -> list[StreamRecord]:
    """Open all streams without a pause, and read them to their ends.

    Args:
        url: of a gateway.
        model: to ask for.
        num_streams: opened at once.
        num_tokens: of each.
        limit_s: seconds after which a stream counts as failed.
    """
    began = time.perf_counter()
    records = [StreamRecord() for _ in range(num_streams)]
    bodies = [json.dumps(body_of(model, number, num_tokens)).encode() for number in range(num_streams)]
    await asyncio.gather(
        *(_run(url, body, record, began, limit_s) for body, record in zip(bodies, records, strict=True))
    )
    for record in records:
        if not record.error and (record.num_tokens, record.finish_reason) != (num_tokens, "length"):
            record.error = f"ended by {record.finish_reason} after {record.num_tokens} of {num_tokens} tokens"
    return records


async def _run(url: str, body: bytes, record: StreamRecord, began: float, limit_s: float) -> None:
    try:
        async with asyncio.timeout(limit_s):
            await _read(url, body, record, began)
    except (OSError, TimeoutError, ValueError) as error:
        record.error = f"{type(error).__name__}: {error}"
    record.ended_s = time.perf_counter() - began


async def _read(url: str, body: bytes, record: StreamRecord, began: float) -> None:
    host, port = urlsplit(url).hostname, urlsplit(url).port
    reader, writer = await asyncio.open_connection(host, port)
    try:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
        status = await reader.readline()
        if b" 200 " not in status:
            raise ValueError(f"{status!r} {(await reader.read())!r}")
        last = began
        async for line in reader:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise ValueError(f"the stream ended with {event['error']}")
            if event.get("usage"):
                record.num_tokens = event["usage"]["completion_tokens"]
            for choice in event["choices"]:
                record.finish_reason = choice["finish_reason"] or record.finish_reason
                if choice["delta"].get("content"):
                    now = time.perf_counter()
                    if record.ttft_s is None:
                        record.ttft_s = now - began
                    else:
                        record.itl_s.append(now - last)
                    last = now
    finally:
        writer.close()


def spread(seconds: Sequence[float]) -> str:
    """Return the distribution in milliseconds."""
    cuts = quantiles(seconds, n=1000)
    shown = {"p10": 99, "p50": 499, "p90": 899, "p99": 989, "p99.9": 998}
    parts = [f"{name} {cuts[place] * 1e3:,.0f}" for name, place in shown.items()]
    return ", ".join([*parts, f"max {max(seconds) * 1e3:,.0f} ms"])


def report(records: Sequence[StreamRecord]) -> int:
    """Print the figures; return the number of streams with an error."""
    errors = [record.error for record in records if record.error]
    wall_s = max(record.ended_s for record in records)
    num_tokens = sum(record.num_tokens for record in records)
    print(f"{len(records)} streams, {num_tokens} tokens in {wall_s:.1f} s ({num_tokens / wall_s:.0f} a second)")
    for error, count in Counter(errors).most_common(5):
        print(f"error, {count} times: {error}")
    firsts = [record.ttft_s for record in records if record.ttft_s is not None]
    gaps = [gap for record in records for gap in record.itl_s]
    if len(firsts) > 1:
        print("TTFT:", spread(firsts))
    if len(gaps) > 1:
        print("ITL: ", spread(gaps))
    print_goal("streams at once without an error", "1,000", f"{len(records)}, {len(errors)} errors")
    return len(errors)


def main() -> int:
    """Run the benchmark; return 1 where a stream had an error."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("serve", nargs="*", metavar="OPTION", help="of pagestream serve, after --")
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        running_serve(Path(folder), "--dtype", "auto", *options.serve) as served,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        url = served.record.http_urls()[0]
        records = runner.run(open_at_once(url, "demo", options.streams, options.tokens, LIMIT_S))
        return 1 if report(records) else 0


if __name__ == "__main__":
    sys.exit(main())
