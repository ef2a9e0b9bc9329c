"""Clients that leave: cancellation after the grace, `on_disconnect`, and resuming in time."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import pytest
import pytest_asyncio
from pagestream.v1 import inference_pb2 as api
from support.clients.gateway_clients import (
    Address,
    chat_text,
    gateway_settings,
    get_events,
    grpc_stub,
    running_address,
    sse_events,
)
from support.engines.synthetic_engine import MODEL, SyntheticEngine
from support.processes.waiting import LIMIT_S

pytestmark = [pytest.mark.served, pytest.mark.asyncio(loop_scope="module")]

CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 6, "seed": 0}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def impatient(shared_engine: SyntheticEngine, redis_url: str) -> AsyncIterator[Address]:
    """Run a gateway that waits 0.3 s for readers to come back."""
    async with running_address(gateway_settings(redis_url, grace_s=0.3)) as address:
        yield address


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not await condition():  # noqa: ASYNC110  what is waited for is in Redis, which rings no event here
            await asyncio.sleep(0.02)


async def state(client: httpx.AsyncClient, request_id: str) -> tuple[str, str | None]:
    view = (await client.get(f"/v1/requests/{request_id}")).json()
    return view["state"], view["finish_reason"]


async def leave_after_two_tokens(address: Address, **fields: Any) -> str:
    """Stream two tokens, close the connection, and return the request id."""
    async with (
        httpx.AsyncClient(base_url=address.url) as client,
        client.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True, **fields}) as response,
    ):
        async for event in sse_events(response):
            if event.next_index == 2:
                break
        return response.headers["X-Request-Id"]


async def test_a_request_without_a_reader_is_cancelled_after_the_grace(
    engine: SyntheticEngine, impatient: Address
) -> None:
    engine.hold_at = 2
    request_id = await leave_after_two_tokens(impatient)
    async with httpx.AsyncClient(base_url=impatient.url) as client:

        async def cancelled() -> bool:
            return await state(client, request_id) == ("finished", "cancelled")

        await until(cancelled)
        assert chat_text(await get_events(client, request_id)) == "ab"


async def test_a_client_that_leaves_with_further_requests_behind_a_stream_is_noticed(
    engine: SyntheticEngine, impatient: Address
) -> None:
    engine.hold_at = 2
    body = json.dumps({**CHAT, "stream": True}).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    behind = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", impatient.http_port)
    writer.write(head + b"Content-Length: %d\r\n\r\n" % len(body) + body + behind * 3)
    async with asyncio.timeout(LIMIT_S):
        answer = await reader.readuntil(b"\r\n\r\n")
    writer.close()
    request_id = answer.lower().partition(b"x-request-id: ")[2].partition(b"\r\n")[0].decode()
    async with httpx.AsyncClient(base_url=impatient.url) as client:

        async def cancelled() -> bool:
            return await state(client, request_id) == ("finished", "cancelled")

        await until(cancelled)


async def test_a_client_that_comes_back_in_time_misses_nothing(
    engine: SyntheticEngine, gateway: Address, http: httpx.AsyncClient
) -> None:
    engine.hold_at = 2
    request_id = await leave_after_two_tokens(gateway)
    assert (await state(http, request_id))[0] == "running"
    reading = asyncio.create_task(get_events(http, request_id, query="?from=2"))
    engine.go_on()
    assert chat_text(await reading) == "cdef"


async def test_on_disconnect_continue_goes_on(engine: SyntheticEngine, impatient: Address) -> None:
    engine.hold_at = 2
    request_id = await leave_after_two_tokens(impatient, on_disconnect="continue")
    # Another request without a reader is cancelled meanwhile, so the grace of the first has passed as well.
    other_id = await leave_after_two_tokens(impatient)
    async with httpx.AsyncClient(base_url=impatient.url) as client:

        async def other_cancelled() -> bool:
            return await state(client, other_id) == ("finished", "cancelled")

        await until(other_cancelled)
        engine.go_on()
        assert chat_text(await get_events(client, request_id)) == "abcdef"
        assert await state(client, request_id) == ("finished", "length")


async def test_a_client_that_leaves_a_whole_answer_stops_reading_too(
    engine: SyntheticEngine, impatient: Address
) -> None:
    engine.hold_at = 2
    async with httpx.AsyncClient(base_url=impatient.url) as client:
        asking = asyncio.create_task(client.post("/v1/chat/completions", json=CHAT))

        async def claimed() -> bool:
            return bool(engine.claimed)

        await until(claimed)
        asking.cancel()
        request_id = engine.claimed[0].request_id

        async def cancelled() -> bool:
            return await state(client, request_id) == ("finished", "cancelled")

        await until(cancelled)


async def test_a_grpc_client_that_leaves(engine: SyntheticEngine, impatient: Address) -> None:
    engine.hold_at = 2
    sampling = api.SamplingParams(max_tokens=6, seed=0)
    async with grpc_stub(impatient) as stub:
        call = stub.Generate(api.GenerateRequest(model=MODEL, prompt="hi", sampling=sampling))
        request_id = (await call.read()).chunk.request_id
        call.cancel()

        async def cancelled() -> bool:
            view = await stub.GetRequest(api.GetRequestRequest(request_id=request_id))
            return bool(view.finish_reason == api.FINISH_REASON_CANCELLED)

        await until(cancelled)
        chunks = [answer.chunk async for answer in stub.Resume(api.ResumeRequest(request_id=request_id))]
    assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == [api.FINISH_REASON_CANCELLED]


async def test_a_timeout_of_the_caller_ends_the_request(engine: SyntheticEngine, http: httpx.AsyncClient) -> None:
    engine.hold_at = 2
    answer = await http.post("/v1/chat/completions", json=CHAT, headers={"X-Request-Timeout": "3"}, timeout=LIMIT_S)
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["finish_reason"] == "deadline"
    assert answer.json()["choices"][0]["message"]["content"] == "ab"
