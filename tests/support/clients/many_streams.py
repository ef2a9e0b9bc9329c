"""Many server-sent-event streams opened at once by one process: what each got, and when.

Each stream has a connection of its own. Times are of events with text: tokens that come together count as one arrival.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

WORDS = ("lighthouse", "harbour", "captain", "baker", "cat", "boat", "storm", "village", "keeper", "sea")


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
    first, second = WORDS[number % len(WORDS)], WORDS[number // len(WORDS) % len(WORDS)]
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
