"""The tries of one answer that is not streamed, which the `openai` client's transport makes without a network."""

import asyncio
from itertools import pairwise
from typing import Any

import httpx2
import openai
import pytest
from pagestream_client import Reconnection
from pagestream_client.openai import transport

LIMIT_S = 0.6
URLS = ["http://one", "http://other"]
POLICY = Reconnection(limit_s=10.0, first_contact_s=10.0, first_delay_s=0.05, max_delay_s=0.05)


def async_client() -> openai.AsyncOpenAI:
    http = httpx2.AsyncClient(transport=transport(URLS, reconnection=POLICY))
    return openai.AsyncOpenAI(base_url=f"{URLS[0]}/v1", api_key="none", http_client=http, max_retries=0)


def blocking_client() -> openai.OpenAI:
    http = httpx2.Client(transport=transport(URLS, reconnection=POLICY))
    return openai.OpenAI(base_url=f"{URLS[0]}/v1", api_key="none", http_client=http, max_retries=0)


@pytest.mark.parametrize("is_async", [True, False], ids=["async", "blocking"])
@pytest.mark.parametrize(
    ("status", "error"), [(0, openai.APITimeoutError), (503, openai.InternalServerError)], ids=["lost", "refused"]
)
async def test_all_tries_of_one_answer_share_the_callers_time_limit(
    monkeypatch: pytest.MonkeyPatch, is_async: bool, status: int, error: type[Exception]
) -> None:
    limits: list[float] = []

    def answer(_: object, request: httpx2.Request) -> httpx2.Response:
        limits.append(request.extensions["timeout"]["read"])
        if not status:
            raise httpx2.ConnectError("gone")
        return httpx2.Response(status)

    async def answer_async(transport: object, request: httpx2.Request) -> httpx2.Response:
        return answer(transport, request)

    monkeypatch.setattr(httpx2.HTTPTransport, "handle_request", answer)
    monkeypatch.setattr(httpx2.AsyncHTTPTransport, "handle_async_request", answer_async)
    ask: dict[str, Any] = {"model": "demo", "prompt": "hello", "timeout": LIMIT_S}

    def work() -> None:
        with blocking_client() as client:
            with pytest.raises(openai.APIError):
                client.models.list()  # opens what is opened once
            limits.clear()
            client.completions.create(**ask)

    async def work_async() -> None:
        async with async_client() as client:
            with pytest.raises(openai.APIError):
                await client.models.list()
            limits.clear()
            await client.completions.create(**ask)

    with pytest.raises(error):
        await (work_async() if is_async else asyncio.to_thread(work))
    first, *rest = limits
    assert first <= LIMIT_S
    assert rest, "there was time for a second try"
    assert all(later < earlier for earlier, later in pairwise(limits[:-1])), "each has what is left"
    assert sum(limit <= 0.001 for limit in limits) <= 1, "no further try when the limit has passed"
