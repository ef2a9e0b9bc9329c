"""Streams as events and as lines: one JSON each, and signs of life between them."""

import json
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
import pytest_asyncio
from pagestream_gateway import Settings, StreamSettings
from support.clients.gateway_clients import Address, get_events, running_address
from support.engines.synthetic_engine import FAILING_TOKEN, MODEL, SyntheticEngine
from support.processes.waiting import LIMIT_S

pytestmark = [pytest.mark.served, pytest.mark.asyncio(loop_scope="module")]


NUM_TOKENS = 12
TEXT = "abcdefghijkl"
ASKED: dict[str, Any] = {"prompt": "hello", "repetition_penalty": 1.0, "logprobs": None, "best_of": 1}
ASKED_CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]}
SHARED = {"model": MODEL, "max_tokens": NUM_TOKENS, "seed": 0, "ignore_eos": True, "temperature": 0.0, "stream": True}


def read_as_vllm(pieces: Iterable[bytes]) -> Iterator[str]:
    rest = ""
    for piece in pieces:
        rest += piece.strip().decode()
        *events, rest = rest.split("\n\n")
        yield from (event.strip().removeprefix("data: ") for event in events if event.strip())
        if _is_whole(rest.removeprefix("data: ").strip()):
            yield rest.removeprefix("data: ").strip()
            rest = ""


def read_as_sglang(pieces: Iterable[bytes]) -> Iterator[str]:
    for line in b"".join(pieces).split(b"\n"):
        if line.strip():
            yield line.strip().decode().removeprefix("data: ")


def _is_whole(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return text == "[DONE]"
    return True


async def pieces_of(url: str, path: str, body: dict[str, Any], engine: SyntheticEngine) -> list[bytes]:
    """Return the body of a stream in the pieces in which it came.

    The engine rests before the first token and the fifth, until the gateway has kept the connection alive.
    """
    engine.hold_at = 0
    pieces: list[bytes] = []
    async with (
        httpx.AsyncClient(base_url=url, timeout=LIMIT_S) as client,
        client.stream("POST", path, json={**SHARED, **body}) as response,
    ):
        assert response.status_code == 200
        async for piece in response.aiter_raw():
            pieces.append(piece)
            if not piece.strip() and engine.hold_at is not None:
                engine.go_on(5 if engine.hold_at == 0 else None)
    assert any(not piece.strip() for piece in pieces), "no sign of life came"
    return pieces


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def url(shared_engine: SyntheticEngine, settings: Settings) -> AsyncIterator[str]:
    """Run a gateway that keeps connections alive after 50 ms of silence."""
    async with running_address(replace(settings, stream=StreamSettings(keep_alive_s=0.05))) as address:
        yield address.url


USAGE = {"stream_options": {"include_usage": True}}


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/completions", ASKED), ("/v1/chat/completions", {**ASKED_CHAT, **USAGE})]
)
async def test_each_event_is_one_line_of_json(
    engine: SyntheticEngine, url: str, path: str, body: dict[str, Any]
) -> None:
    """As vLLM's and SGLang's serving benchmarks read them, which count the first event with text as the first token.

    vLLM (`vllm/benchmarks/lib/endpoint_request_func.py`, 0.32) strips each piece that the network delivers, joins the
    pieces, takes what stands before an empty line for an event, and a rest that is JSON already for one more; an event
    is `data: ` and then JSON or [DONE]. SGLang (`sglang/benchmark/serving.py`, 0.5) takes each line that is not blank
    for an event; in a stream of completions each has `choices[0].text`.
    """
    pieces = await pieces_of(url, path, body, engine)
    whole = b"".join(pieces)
    for cut in (pieces, [whole], [line + b"\n" for line in whole.split(b"\n")]):
        for read in (read_as_vllm, read_as_sglang):
            *events, last = read(cut)
            assert last == "[DONE]"
            check([json.loads(event) for event in events], has_usage="stream_options" in body)
    first = next(piece for piece in pieces if piece.strip())
    assert first.startswith(b"data: {")
    texts = [text_of_choice(choice) for event in read_as_sglang([first]) for choice in json.loads(event)["choices"]]
    assert TEXT[0] in "".join(texts), "the first event comes with the first token"


def check(chunks: list[dict[str, Any]], *, has_usage: bool) -> None:
    choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    assert "".join(text_of_choice(choice) for choice in choices) == TEXT
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks if chunk.get("usage")] == [NUM_TOKENS] * has_usage
    assert len(choices) == len(chunks) - has_usage, "only the usage may lack a choice, and only where it is asked for"
    indices = [int(chunk["stream_position"].split("/")[1]) for chunk in chunks]
    assert indices == sorted(set(indices))


def text_of_choice(choice: dict[str, Any]) -> str:
    text: str = choice.get("text") or choice.get("delta", {}).get("content") or ""
    return text


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


async def test_silence_is_filled_with_empty_lines(engine: SyntheticEngine, url: str) -> None:
    for headers in ({}, LINES):
        engine.hold_at = 1
        seen: list[str] = []
        async with (
            httpx.AsyncClient(base_url=url, timeout=LIMIT_S) as client,
            client.stream("POST", "/v1/completions", json=COMPLETION, headers=headers) as response,
        ):
            async for line in response.aiter_lines():
                seen.append(line)
                if seen[-6:] == [""] * 6:
                    engine.go_on()
        assert all(not line or line.startswith("{" if headers else "data: ") for line in seen)
        assert "done" in seen[-1] or "data: [DONE]" in seen


async def test_lines_are_sent_to_those_who_prefer_them(http: httpx.AsyncClient) -> None:
    for accept, are_lines in (
        ("*/*", False),
        ("text/event-stream", False),
        ("application/x-ndjson", True),
        ("Application/X-NDJSON; charset=utf-8", True),
        ("application/json, application/x-ndjson;q=0.5, */*;q=0.1", True),
        ("text/event-stream, application/x-ndjson", False),
        ("application/x-ndjson, text/event-stream", True),
        ("application/x-ndjson;q=0.5, text/event-stream", False),
        ("text/event-stream;q=0.5, application/x-ndjson;q=0.9", True),
        ("application/x-ndjson;q=0", False),
        ("application/x-ndjson;q=x", False),
        ("", False),
    ):
        answer = await http.post("/v1/completions", json={**COMPLETION, "max_tokens": 1}, headers={"Accept": accept})
        kind = "application/x-ndjson" if are_lines else "text/event-stream"
        assert answer.headers["Content-Type"].partition(";")[0] == kind, accept
