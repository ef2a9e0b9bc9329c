"""Streams as NDJSON: the chunks of events, the same positions, and a last line that says that all has come."""

import json
from dataclasses import replace
from typing import Any

import httpx
import pytest
from pagestream_gateway import Settings
from pagestream_gateway.settings import StreamSettings
from support.clients.gateway_clients import Address, get_events
from support.engines.synthetic_engine import FAILING_TOKEN, MODEL, SyntheticEngine

LINES = {"Accept": "application/x-ndjson"}
CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 20, "seed": 0}
COMPLETION: dict[str, Any] = {"model": MODEL, "prompt": "hello", "max_tokens": 20, "seed": 0, "stream": True}


def lines_of(text: str) -> list[dict[str, Any]]:
    """Return the JSON of each line; empty ones keep a connection alive."""
    assert text.endswith("\n")
    return [json.loads(line) for line in text.split("\n") if line]


def text_of(chunks: list[dict[str, Any]]) -> str:
    """Return the text of chunks of either kind of completions."""
    parts = [chunk["choices"][0] for chunk in chunks]
    return "".join(part.get("text") or part.get("delta", {}).get("content") or "" for part in parts)


@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)])
async def test_lines_are_the_chunks_of_events(
    http: httpx.AsyncClient, other_gateway: Address, path: str, body: dict[str, Any]
) -> None:
    answer = await http.post(path, json={**body, "stream": True}, headers=LINES)
    assert answer.headers["Content-Type"] == "application/x-ndjson"
    *chunks, done = lines_of(answer.text)
    request_id = answer.headers["X-Request-Id"]
    events = await get_events(http, request_id)
    assert text_of(chunks) == text_of([event.body for event in events[:-1]]) == "abcdefghijklmnopqrst"
    assert done == {"done": True, "stream_position": events[-2].position}
    async with httpx.AsyncClient(base_url=other_gateway.url) as other:
        for place in (chunks[0]["stream_position"], done["stream_position"]):
            by_lines = await other.get(f"/v1/requests/{request_id}/events", headers={**LINES, "Last-Event-ID": place})
            by_events = await get_events(other, request_id, after=place)
            assert lines_of(by_lines.text)[:-1] == [event.body for event in by_events[:-1]]
            assert lines_of(by_lines.text)[-1] == done


async def test_a_failed_request_ends_with_its_error(http: httpx.AsyncClient) -> None:
    answer = await http.post("/v1/completions", json={**COMPLETION, "prompt": [FAILING_TOKEN]}, headers=LINES)
    failed, done = lines_of(answer.text)[-2:]
    assert (failed["error"]["code"], done["done"]) == ("engine_error", True)
    assert failed["stream_position"] == done["stream_position"]


async def test_silence_has_empty_lines(engine: SyntheticEngine, settings: Settings, another: Any) -> None:
    engine.hold_at = 1
    quick = replace(settings, stream=StreamSettings(keep_alive_s=0.05))
    seen = []
    async with (
        another(quick) as address,
        httpx.AsyncClient(base_url=address.url) as client,
        client.stream("POST", "/v1/completions", json=COMPLETION, headers=LINES) as response,
    ):
        async for line in response.aiter_lines():
            seen.append(line)
            if seen[-3:] == [""] * 3:
                engine.go_on()
    assert json.loads(seen[-1])["done"] is True
