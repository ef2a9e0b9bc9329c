"""A greedy stream beside the requests, in a process of its own: when its tokens come, and whether they are the same.

    python -m campaigns.hostile_requests.canary URL MODEL

It reads streams one after the other. After the first ones it says "alone"; the end of standard input ends it, and then
it prints what it saw as JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httpx
from pagestream_streams.tasks import cancel

ALONE = "alone"
STREAMS_ALONE = 2
TOKENS = 900
PROMPT = "Tell me a story about the lighthouse and the keeper who lives in it."
_LIMIT_S = 180.0
_PAUSE_S = 0.5


@dataclass
class Seen:
    """What the canary saw."""

    alone_ms: Counter[int] = field(default_factory=Counter)
    """Gaps between two events, and how often each occurred, before there were other requests."""
    beside_ms: Counter[int] = field(default_factory=Counter)
    first_s: float = 0.0
    """The longest wait for a first token beside the requests."""
    num_streams: int = 0
    """Beside the requests."""
    num_tokens: int = 0
    num_unequal: int = 0
    """Streams whose tokens differ from the first one's."""
    errors: list[str] = field(default_factory=list)
    longest_at: float = 0.0
    """The time at the end of the longest gap, by the clock of time.time()."""


class Canary:
    """Reads streams."""

    def __init__(self, url: str, model: str) -> None:
        self._url, self._model = url, model
        self.seen = Seen()
        self.is_alone = asyncio.Event()
        self._expected: list[int] | None = None

    async def run(self) -> None:
        """Read until cancelled."""
        async with httpx.AsyncClient(base_url=self._url, timeout=_LIMIT_S) as client:
            number = 0
            while True:
                is_beside = self.is_alone.is_set()
                try:
                    await self._read(client, self.seen.beside_ms if is_beside else self.seen.alone_ms, is_beside)
                except (httpx.HTTPError, RuntimeError) as error:
                    self.seen.errors.append(repr(error)[:400])
                    await asyncio.sleep(_PAUSE_S)
                number += 1
                if number == STREAMS_ALONE:
                    self.is_alone.set()

    async def _read(self, client: httpx.AsyncClient, gaps_ms: Counter[int], is_beside: bool) -> None:
        body: dict[str, Any] = {"model": self._model, "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0}
        body |= {"ignore_eos": True, "stream": True, "return_token_ids": True}
        tokens: list[int] = []
        last = begun = time.monotonic()
        is_whole = False
        try:
            async with client.stream("POST", "/v1/completions", json=body) as answer:
                if answer.status_code != httpx.codes.OK:
                    raise RuntimeError(f"{answer.status_code} {(await answer.aread())[:300]!r}")
                async for line in answer.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    event = json.loads(line[6:])
                    if "error" in event:
                        raise RuntimeError(json.dumps(event["error"]))
                    now = time.monotonic()
                    if tokens:
                        self._add(gaps_ms, now - last)
                    elif is_beside:
                        self.seen.first_s = max(self.seen.first_s, now - begun)
                    last = now
                    for choice in event["choices"]:
                        tokens += choice.get("token_ids") or []
                is_whole = True
        finally:
            if is_beside and not is_whole:  # what is still open counts
                if tokens:
                    self._add(gaps_ms, time.monotonic() - last)
                else:
                    self.seen.first_s = max(self.seen.first_s, time.monotonic() - begun)
            self._compare(tokens, is_whole, is_beside)

    def _add(self, gaps_ms: Counter[int], seconds: float) -> None:
        gap = round(1000 * seconds)
        if gaps_ms is self.seen.beside_ms and gap > max(gaps_ms, default=0):
            self.seen.longest_at = time.time()
        gaps_ms[gap] += 1

    def _compare(self, tokens: list[int], is_whole: bool, is_beside: bool) -> None:
        if self._expected is None:
            if is_whole:
                self._expected = tokens
            return
        expected = self._expected if is_whole else self._expected[: len(tokens)]
        self.seen.num_unequal += tokens != expected
        if is_beside:
            self.seen.num_streams += 1
            self.seen.num_tokens += len(tokens)


async def main() -> None:
    """Run the command."""
    canary = Canary(*sys.argv[1:3])
    reading = asyncio.create_task(canary.run())
    await asyncio.wait({asyncio.create_task(canary.is_alone.wait()), reading}, return_when=asyncio.FIRST_COMPLETED)
    print(ALONE, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    with suppress(asyncio.CancelledError):
        await cancel(reading)
    print(json.dumps(vars(canary.seen)))


if __name__ == "__main__":
    asyncio.run(main())
