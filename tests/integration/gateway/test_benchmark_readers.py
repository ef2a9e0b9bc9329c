"""Streams as the serving benchmarks of vLLM and SGLang read them, which know less of server-sent events than clients.

vLLM (`vllm/benchmarks/lib/endpoint_request_func.py`, 0.32) strips each piece that the network delivers, joins the
pieces, takes what stands before an empty line for an event, and a rest that is JSON already for one more; an event is
`data: ` and then JSON or [DONE]. SGLang (`sglang/benchmark/serving.py`, 0.5) takes each line that is not blank for an
event; in a stream of completions each has `choices[0].text`. Both count the first event with a choice as the first
token: SGLang where it has text.
"""

import json
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from pagestream_gateway import Settings
from pagestream_gateway.settings import StreamSettings
from support.clients.gateway_clients import running_address
from support.engines.synthetic_engine import MODEL, SyntheticEngine

NUM_TOKENS = 12
TEXT = "abcdefghijkl"
COMPLETION: dict[str, Any] = {"prompt": "hello", "repetition_penalty": 1.0, "logprobs": None, "best_of": 1}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]}
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
        httpx.AsyncClient(base_url=url, timeout=20.0) as client,
        client.stream("POST", path, json={**SHARED, **body}) as response,
    ):
        assert response.status_code == 200
        async for piece in response.aiter_raw():
            pieces.append(piece)
            if not piece.strip() and engine.hold_at is not None:
                engine.go_on(5 if engine.hold_at == 0 else None)
    assert any(not piece.strip() for piece in pieces), "no sign of life came"
    return pieces


@pytest.fixture
async def url(engine: SyntheticEngine, settings: Settings) -> AsyncIterator[str]:
    """Run a gateway that keeps connections alive after 50 ms of silence."""
    async with running_address(replace(settings, stream=StreamSettings(keep_alive_s=0.05))) as address:
        yield address.url


@pytest.mark.parametrize("usage", [{}, {"stream_options": {"include_usage": True}}], ids=["plain", "usage"])
@pytest.mark.parametrize(("path", "body"), [("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)])
async def test_each_event_is_one_line_of_json(
    engine: SyntheticEngine, url: str, path: str, body: dict[str, Any], usage: dict[str, Any]
) -> None:
    pieces = await pieces_of(url, path, {**body, **usage}, engine)
    whole = b"".join(pieces)
    for cut in (pieces, [whole], [line + b"\n" for line in whole.split(b"\n")]):
        for read in (read_as_vllm, read_as_sglang):
            *events, last = read(cut)
            assert last == "[DONE]"
            check([json.loads(event) for event in events], has_usage=bool(usage))


def check(chunks: list[dict[str, Any]], *, has_usage: bool) -> None:
    choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    assert "".join(text_of(choice) for choice in choices) == TEXT
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks if chunk.get("usage")] == [NUM_TOKENS] * has_usage
    assert len(choices) == len(chunks) - has_usage, "only the usage may lack a choice, and only where it is asked for"
    indices = [int(chunk["stream_position"].split("/")[1]) for chunk in chunks]
    assert indices == sorted(set(indices))


def text_of(choice: dict[str, Any]) -> str:
    text: str = choice.get("text") or choice.get("delta", {}).get("content") or ""
    return text


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)])
async def test_the_first_event_comes_with_the_first_token(
    engine: SyntheticEngine, url: str, path: str, body: dict[str, Any]
) -> None:
    pieces = await pieces_of(url, path, body, engine)
    first = next(piece for piece in pieces if piece.strip())
    assert first.startswith(b"data: {")
    texts = [text_of(choice) for event in read_as_sglang([first]) for choice in json.loads(event)["choices"]]
    assert TEXT[0] in "".join(texts)
