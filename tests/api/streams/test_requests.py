"""A tenant's requests over HTTP: their list, their seeds, and requests that are accepted again."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
from support.clients.gateway_clients import (
    Address,
    bearer,
    chat_text,
    gateway_settings,
    get_events,
    lose,
    post_events,
    running_address,
    write_keys,
)
from support.engines.synthetic_engine import MODEL, SyntheticEngine

pytestmark = [pytest.mark.served, pytest.mark.asyncio(loop_scope="module")]

CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 6}
PROMPTS: dict[str, Any] = {"model": MODEL, "prompt": ["x", "y"], "max_tokens": 3}


WRONG_PAGES = [
    *((f"limit={limit}", "limit") for limit in ("0", "101", "00000000110000", "00000000" + "1" * 5000)),
    ("after=x", "after"),
]


async def test_a_wrong_page_is_named(http: httpx.AsyncClient) -> None:
    for query, field in WRONG_PAGES:
        answer = await http.get(f"/v1/requests?{query}")
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def tenants(
    shared_engine: SyntheticEngine, redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Address]:
    """Run a gateway with the keys key-a, key-b and key-c, of the tenants a, b and c."""
    keys = write_keys(tmp_path_factory.mktemp("keys") / "keys", {f"key-{name}": name for name in "abc"})
    async with running_address(gateway_settings(redis_url, keys=keys)) as address:
        yield address


async def test_the_list_shows_what_the_tenant_asked_for_newest_first(tenants: Address, engine: SyntheticEngine) -> None:
    async with httpx.AsyncClient(base_url=tenants.url, headers=bearer("key-c")) as http:
        ids = [(await http.post("/v1/chat/completions", json=CHAT)).headers["X-Request-Id"] for _ in range(3)][::-1]
        whole = (await http.get("/v1/requests")).json()
        assert [each["id"] for each in whole["data"]] == ids
        assert not whole["has_more"]
        newest = whole["data"][0]
        assert (newest["model"], newest["state"], newest["finish_reason"]) == (MODEL, "finished", "length")
        assert (newest["next_index"], newest["usage"]["completion_tokens"], newest["attempts"]) == (8, 6, 1)
        page = (await http.get("/v1/requests?limit=2")).json()
        assert ([each["id"] for each in page["data"]], page["has_more"]) == (ids[:2], True)
        page = (await http.get(f"/v1/requests?limit=2&after={ids[1]}")).json()
        assert ([each["id"] for each in page["data"]], page["has_more"]) == (ids[2:], False)


async def test_tenants_see_and_accept_their_own_alone(
    tenants: Address, engine: SyntheticEngine, redis_url: str
) -> None:
    async with (
        httpx.AsyncClient(base_url=tenants.url, headers=bearer("key-a")) as one,
        httpx.AsyncClient(base_url=tenants.url, headers=bearer("key-b")) as other,
    ):
        first = await one.post("/v1/chat/completions", json=CHAT)
        request_id, seed = first.headers["X-Request-Id"], first.headers["X-Request-Seed"]
        assert [each["id"] for each in (await one.get("/v1/requests")).json()["data"]] == [request_id]
        assert (await other.get("/v1/requests")).json()["data"] == []

        async def refused() -> str:
            answer = await other.put(f"/v1/requests/{request_id}", json=CHAT, headers={"X-Request-Seed": seed})
            code: str = answer.json()["error"]["code"]
            return code

        assert await refused() == "request_not_found"
        await lose(redis_url, request_id)
        assert await refused() == "request_not_found"


async def test_every_answer_has_the_seed(http: httpx.AsyncClient, engine: SyntheticEngine) -> None:
    for body in (CHAT, {**CHAT, "stream": True}, {**CHAT, "seed": 5}):
        answer = await http.post("/v1/chat/completions", json=body)
        assert answer.headers["X-Request-Seed"] == str(engine.claimed[-1].sampling.seed)
        request_id = answer.headers["X-Request-Id"]
        for path in (request_id, f"{request_id}/events"):
            assert (await http.get(f"/v1/requests/{path}")).headers["X-Request-Seed"] == answer.headers[
                "X-Request-Seed"
            ]
    assert answer.headers["X-Request-Seed"] == "5"


@pytest.mark.parametrize("body", [CHAT, PROMPTS, {**PROMPTS, "seed": 3}], ids=["chat", "prompts", "seeded"])
async def test_a_lost_request_is_accepted_again_with_the_same_tokens(
    http: httpx.AsyncClient, other_gateway: Address, engine: SyntheticEngine, redis_url: str, body: dict[str, Any]
) -> None:
    answer = await http.post("/v1/chat/completions" if "messages" in body else "/v1/completions", json=body)
    request_id, seed = answer.headers["X-Request-Id"], answer.headers["X-Request-Seed"]
    before = (await get_events(http, request_id))[-2].position
    await lose(redis_url, request_id)
    assert (await http.get(f"/v1/requests/{request_id}")).status_code == 404
    async with httpx.AsyncClient(base_url=other_gateway.url) as other:
        for _ in range(2):
            again = await other.put(f"/v1/requests/{request_id}", json=body, headers={"X-Request-Seed": seed})
            assert (again.status_code, again.json()["id"]) == (200, request_id)
            assert again.headers["X-Request-Seed"] == seed
        assert (await get_events(other, request_id))[-2].position == before, "the digest is of all tokens"
    first, second = engine.claimed
    assert (first.request_id, first.prompts, first.sampling) == (second.request_id, second.prompts, second.sampling)
    assert first.seed_for_each_prompt == second.seed_for_each_prompt


async def test_a_request_that_is_there_stays_as_it_is(http: httpx.AsyncClient, engine: SyntheticEngine) -> None:
    answer = await http.post("/v1/chat/completions", json=CHAT)
    name, seed = f"/v1/requests/{answer.headers['X-Request-Id']}", answer.headers["X-Request-Seed"]
    other_seed = str(int(seed) ^ 1)
    for body, given in ((CHAT, other_seed), ({**CHAT, "max_tokens": 5}, seed)):
        refused = await http.put(name, json=body, headers={"X-Request-Seed": given})
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "request_differs")
    assert (await http.put(name, json=CHAT, headers={"X-Request-Seed": seed})).json()["state"] == "finished"
    assert len(engine.claimed) == 1
    for headers in ({}, {"X-Request-Seed": "x"}, {"X-Request-Seed": str(2**63)}):
        refused = await http.put(name, json=CHAT, headers=headers)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "X-Request-Seed")
    refused = await http.put(name, json={**CHAT, "seed": 1}, headers={"X-Request-Seed": "2"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "X-Request-Seed")


async def test_reading_from_a_number_alone_is_marked(http: httpx.AsyncClient) -> None:
    request_id, events = await post_events(http, "/v1/chat/completions", CHAT)
    name = f"/v1/requests/{request_id}/events"
    assert (await http.get(name)).headers["X-Stream-Verified"] == "true"
    assert (await http.get(f"{name}?from=0")).headers["X-Stream-Verified"] == "true"
    assert (await http.get(f"{name}?from=3")).headers["X-Stream-Verified"] == "false"
    last = {"Last-Event-ID": events[-2].position}
    assert (await http.get(name, headers=last)).headers["X-Stream-Verified"] == "true"
    assert (await http.get(name, headers={"Last-Event-ID": f"{request_id}/3/"})).headers["X-Stream-Verified"] == "false"
    assert chat_text(events)
