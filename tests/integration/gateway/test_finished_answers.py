"""GET /v1/requests/<id>/answer: what the first call would have been answered with, on any gateway."""

from typing import Any

import httpx
import pytest
from support.clients.gateway_clients import Address
from support.engines.synthetic_engine import FAILING_TOKEN, MODEL, SyntheticEngine
from support.protocol.token_streams import eventually

SAID = [{"role": "user", "content": "hello"}]
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": ["a", "b"], "n": 2, "logprobs": 1, "max_tokens": 4}),
    ("/v1/chat/completions", {"messages": SAID, "max_tokens": 4}),
    ("/v1/responses", {"input": "hello", "max_output_tokens": 4}),
    ("/v1/messages", {"messages": SAID, "max_tokens": 4}),
]
FAILING = {"max_tokens": 4, "prompt": [FAILING_TOKEN]}


@pytest.mark.parametrize(("path", "body"), [*CALLS, ("/v1/completions", FAILING)])
async def test_an_answer_is_read_again_as_it_was(
    http: httpx.AsyncClient, other_gateway: Address, path: str, body: dict[str, Any]
) -> None:
    first = await http.post(path, json={"model": MODEL, **body})
    place = f"/v1/requests/{first.headers['X-Request-Id']}/answer"
    async with httpx.AsyncClient(base_url=other_gateway.url) as other:
        again = await other.get(place)
    assert (again.status_code, again.json()) == (first.status_code, first.json())
    assert again.headers["X-Request-Seed"] == first.headers["X-Request-Seed"]


async def test_the_answer_of_a_request_that_runs_is_its_state(http: httpx.AsyncClient, engine: SyntheticEngine) -> None:
    engine.hold_at = 2
    body = {"model": MODEL, "prompt": "x", "max_tokens": 4, "on_disconnect": "continue", "stream": True}
    async with http.stream("POST", "/v1/completions", json=body) as stream:
        place = f"/v1/requests/{stream.headers['X-Request-Id']}"
    early = await http.get(f"{place}/answer")
    assert (early.status_code, early.json()["state"], early.headers["Retry-After"]) == (202, "running", "1")
    engine.go_on()

    async def is_answered() -> bool:
        return (await http.get(f"{place}/answer")).status_code == 200

    await eventually(is_answered)
    answer = (await http.get(f"{place}/answer")).json()
    assert (answer["object"], len(answer["choices"][0]["text"])) == ("text_completion", 4)
    assert (await http.get("/v1/requests/none/answer")).status_code == 404
