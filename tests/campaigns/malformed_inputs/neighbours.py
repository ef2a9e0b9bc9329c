"""Callers beside the malformed inputs: their answers are known, and have to be in time."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any

import httpx

ANSWER_TOKENS = 16
STREAM_TOKENS = 400
EVERY_S = 0.25
LIMIT_S = 60.0
SEED = 3


def expected_text(count: int) -> str:
    """Return the text of the synthetic engine's only choice (`synthetic_engine.answer_text`)."""
    return "".join(chr(ord("a") + (SEED + place) % 26) for place in range(count))


@dataclass
class Neighbours:
    """A client that asks again and again, and streams of a model with a steady rate, one after the other."""

    url: str
    model: str
    """Answers at once."""
    steady_model: str
    answers_s: list[float] = field(default_factory=list)
    """Seconds that answers took."""
    gaps_s: list[float] = field(default_factory=list)
    """Seconds between two events of the streams."""
    num_streams: int = 0
    """Streams that have ended, with the right text."""
    errors: list[str] = field(default_factory=list)

    async def run(self) -> None:
        """Call until cancelled."""
        async with httpx.AsyncClient(base_url=self.url, timeout=LIMIT_S) as client, asyncio.TaskGroup() as tasks:
            tasks.create_task(self._ask(client))
            tasks.create_task(self._stream(client))

    async def _ask(self, client: httpx.AsyncClient) -> None:
        body = _body(self.model, ANSWER_TOKENS)
        while True:
            begun = time.perf_counter()
            try:
                answer = await client.post("/v1/completions", json=body)
                text = answer.json()["choices"][0]["text"] if answer.is_success else f"{answer.status_code}"
            except httpx.HTTPError as error:
                text = repr(error)
            if text != expected_text(ANSWER_TOKENS):
                self.errors.append(f"an answer is {text[:200]}")
            self.answers_s.append(time.perf_counter() - begun)
            await asyncio.sleep(EVERY_S)

    async def _stream(self, client: httpx.AsyncClient) -> None:
        body = _body(self.steady_model, STREAM_TOKENS) | {"stream": True}
        while True:
            try:
                async with client.stream("POST", "/v1/completions", json=body) as answer:
                    text = await self._text(answer)
            except httpx.HTTPError as error:
                text = repr(error)
            if text == expected_text(STREAM_TOKENS):
                self.num_streams += 1
            else:
                self.errors.append(f"a stream is {text[-200:]}")
                await asyncio.sleep(EVERY_S)

    async def _text(self, answer: httpx.Response) -> str:
        text, last = "", None
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            now = time.perf_counter()
            if last is not None:
                self.gaps_s.append(now - last)
            last = now
            body: dict[str, Any] = json.loads(line[6:])
            text += "".join(choice["text"] for choice in body["choices"])
        return text


def _body(model: str, count: int) -> dict[str, Any]:
    return {"model": model, "prompt": "hello", "max_tokens": count, "seed": SEED, "ignore_eos": True}
