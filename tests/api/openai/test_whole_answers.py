"""Answers that are not streamed, in a gateway with little memory for them: complete, in turn, or refused clearly."""

import asyncio
import dataclasses
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
import pytest_asyncio
from pagestream_gateway import Settings, StreamSettings
from support.clients.gateway_clients import Address, gateway_settings, get_events, running_address
from support.engines.synthetic_engine import (
    FAILING_TOKEN,
    MODEL,
    SyntheticEngine,
    answer_text,
    running_engine,
    synthetic_card,
)
from support.processes.waiting import LIMIT_S
from support.protocol.token_streams import eventually

pytestmark = [pytest.mark.served, pytest.mark.asyncio(loop_scope="module")]

LONG_MODEL = "long"
MB = 1_000_000


def little_memory(redis_url: str, num_bytes: int, wait_s: float = LIMIT_S) -> Settings:
    stream = StreamSettings(whole_answers_bytes=num_bytes, whole_answer_wait_s=wait_s)
    return dataclasses.replace(gateway_settings(redis_url), stream=stream)


@asynccontextmanager
async def client_of(address: Address) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=address.url, timeout=LIMIT_S) as client:
        yield client


def asked(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "Once", "max_tokens": 100, "n": 4, "seed": 0, "ignore_eos": True, **fields}


async def test_answers_that_do_not_fit_together_are_all_complete(engine: SyntheticEngine, redis_url: str) -> None:
    """There is room for one of them, and for none while the log is followed."""
    engine.hold_at = 300
    async with running_address(little_memory(redis_url, 3000)) as address, client_of(address) as client:
        answers = [asyncio.create_task(client.post("/v1/completions", json=asked())) for _ in range(6)]
        async with asyncio.timeout(LIMIT_S):
            await eventually(lambda: len(engine.claimed) == len(answers))
            engine.go_on()
            found = [answer.json() for answer in await asyncio.gather(*answers)]
    spec = engine.claimed[0]
    texts = [answer_text(spec, choice) for choice in range(4)]
    assert [[choice["text"] for choice in answer["choices"]] for answer in found] == [texts] * len(answers)
    assert {answer["usage"]["completion_tokens"] for answer in found} == {400}


async def test_an_answer_that_never_fits_is_refused_and_read_as_events(engine: SyntheticEngine, redis_url: str) -> None:
    async with running_address(little_memory(redis_url, 2400)) as address, client_of(address) as client:
        refused = await client.post("/v1/completions", json=asked())
        request_id = refused.headers["X-Request-Id"]
        error = refused.json()["error"]
        assert (refused.status_code, error["code"]) == (400, "answer_too_large")
        assert f"/v1/requests/{request_id}/events" in error["message"]
        texts = [""] * 4
        for event in await get_events(client, request_id):
            if event.data != "[DONE]":
                for choice in event.body["choices"]:
                    texts[choice["index"]] += choice["text"]
        assert texts == [answer_text(engine.claimed[0], choice) for choice in range(4)]


async def test_a_client_that_does_not_take_its_answer_holds_no_memory(redis_url: str) -> None:
    """Another answer of the size of all memory comes meanwhile. Then the first client reads on, and misses nothing."""
    prompt, n = "x" * 100_000, 128
    body = asked(model=LONG_MODEL, prompt=prompt, n=n, max_tokens=1, echo=True)
    size = n * (len(prompt) + 600)
    async with (
        running_engine(redis_url, synthetic_card(LONG_MODEL, max_model_len=2**20)) as engine,
        running_address(little_memory(redis_url, size + 20_000)) as address,
        client_of(address) as client,
        asyncio.timeout(LIMIT_S),
    ):
        stalled = socket.socket()
        try:
            stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
            received = await _begin(stalled, address, json.dumps(body).encode())
            other = await client.post("/v1/completions", json=body)
            texts = [prompt + answer_text(engine.claimed[0], choice) for choice in range(n)]
            assert [choice["text"] for choice in other.json()["choices"]] == texts
            stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, MB)
            while part := await asyncio.get_running_loop().sock_recv(stalled, MB):
                received += part
        finally:
            stalled.close()
        head, _, content = received.partition(b"\r\n\r\n")
        assert f"content-length: {len(content)}".encode() in head.lower()
        assert [choice["text"] for choice in json.loads(content)["choices"]] == texts


@pytest.mark.slow
async def test_a_slow_client_gives_way_to_others(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes each piece in time, but needs longer for its answer than the others would wait; it misses nothing."""
    monkeypatch.setattr("pagestream_gateway.streams.whole_answer.STALL_S", 0.4)
    monkeypatch.setattr("pagestream_gateway.streams.whole_answer._TURN_S", 1.0)
    prompt, n = "x" * 100_000, 64
    body = asked(model=LONG_MODEL, prompt=prompt, n=n, max_tokens=1, echo=True)
    size = n * (len(prompt) + 600)
    async with (
        running_engine(redis_url, synthetic_card(LONG_MODEL, max_model_len=2**20)) as engine,
        running_address(little_memory(redis_url, size + 20_000, wait_s=5.0)) as address,
        client_of(address) as client,
        asyncio.timeout(LIMIT_S),
    ):
        slow = socket.socket()
        try:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16_384)
            received = await _begin(slow, address, json.dumps(body).encode())
            others = [asyncio.create_task(client.post("/v1/completions", json=body)) for _ in range(2)]
            while not all(other.done() for other in others):  # less than 64 KiB in 0.4 s would be a stall
                received += await asyncio.get_running_loop().sock_recv(slow, 16_384)
                await asyncio.sleep(0.02)  # how the client is slow
            assert [other.result().status_code for other in others] == [200, 200]
            assert len(received) < size / 2, "the client was not slow"
            while part := await asyncio.get_running_loop().sock_recv(slow, MB):
                received += part
        finally:
            slow.close()
        head, _, content = received.partition(b"\r\n\r\n")
        assert f"content-length: {len(content)}".encode() in head.lower()
        texts = [prompt + answer_text(engine.claimed[0], choice) for choice in range(n)]
        assert [choice["text"] for choice in json.loads(content)["choices"]] == texts


async def test_memory_that_stays_in_use_is_waited_for_in_vain(redis_url: str, engine: SyntheticEngine) -> None:
    async with running_address(little_memory(redis_url, 4000, wait_s=0.1)) as address, client_of(address) as client:
        engine.hold_at = 60
        holder = asyncio.create_task(client.post("/v1/completions", json=asked(n=6, max_tokens=20)))
        await eventually(lambda: bool(engine.claimed))
        engine.hold_at = 50  # its 60 entries are in the log, and what it has keeps the next one from its room
        late = await client.post("/v1/completions", json=asked(n=4, max_tokens=11))
        assert (late.status_code, late.json()["error"]["code"]) == (429, "overloaded")
        assert float(late.headers["Retry-After"]) > 0
        engine.go_on()
        assert (await holder).status_code == 200


async def _begin(connection: socket.socket, address: Address, body: bytes) -> bytes:
    """Send a request, and read the first bytes of its answer."""
    loop = asyncio.get_running_loop()
    connection.setblocking(False)
    await loop.sock_connect(connection, ("127.0.0.1", address.http_port))
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
    await loop.sock_sendall(connection, f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    return await loop.sock_recv(connection, 64)


# -- A proxy drops a connection that is silent for too long: blanks go before the body where the settings ask for it.


WHOLE = {
    "/v1/completions": asked(n=1),
    "/v1/chat/completions": {"model": MODEL, "messages": [{"role": "user", "content": "Once"}], "max_tokens": 20},
    "/v1/responses": {"model": MODEL, "input": "Once", "max_output_tokens": 20},
    "/v1/messages": {"model": MODEL, "messages": [{"role": "user", "content": "Once"}], "max_tokens": 20},
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def impatient(shared_engine: SyntheticEngine, redis_url: str) -> AsyncIterator[httpx.AsyncClient]:
    """Open a client of a gateway that sends blanks early."""
    stream = StreamSettings(whole_answer_blanks_after_s=0.05, keep_alive_s=0.05)
    settings = dataclasses.replace(gateway_settings(redis_url), stream=stream)
    async with running_address(settings) as address, client_of(address) as client:
        yield client


@pytest.mark.parametrize("path", WHOLE)
async def test_blanks_go_before_an_answer_that_is_long_in_coming(
    engine: SyntheticEngine, impatient: httpx.AsyncClient, path: str
) -> None:
    engine.hold_at = 2
    async with asyncio.timeout(LIMIT_S), impatient.stream("POST", path, json=WHOLE[path]) as answer:
        assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json")
        assert (answer.headers["x-accel-buffering"], "content-length" in answer.headers) == ("no", False)
        parts = answer.aiter_raw()
        begun = [await anext(parts) for _ in range(3)]
        assert set(b"".join(begun)) == {ord("\n")}
        engine.go_on()
        rest = b"".join([part async for part in parts])
    assert json.loads(b"".join(begun) + rest)["id"] in answer.headers["x-request-id"]


async def test_a_failure_after_blanks_cuts_the_answer(engine: SyntheticEngine, impatient: httpx.AsyncClient) -> None:
    """Its status is out: a body that is no answer would be taken for one."""
    engine.hold_at = 0
    body = asked(n=1, prompt=[FAILING_TOKEN])
    async with asyncio.timeout(LIMIT_S), impatient.stream("POST", "/v1/completions", json=body) as answer:
        parts = answer.aiter_raw()
        assert set(await anext(parts)) == {ord("\n")}
        engine.go_on()
        with pytest.raises(httpx.RemoteProtocolError):
            assert not [part async for part in parts if part.strip()]


async def test_without_the_setting_nothing_goes_before_the_end(engine: SyntheticEngine, redis_url: str) -> None:
    stream = StreamSettings(keep_alive_s=0.05)
    settings = dataclasses.replace(gateway_settings(redis_url), stream=stream)
    engine.hold_at = 2
    async with running_address(settings) as address, client_of(address) as client, asyncio.timeout(LIMIT_S):
        call = asyncio.create_task(client.post("/v1/completions", json=asked(n=1)))
        await eventually(lambda: len(engine.claimed) == 1)
        async with client.stream("POST", "/v1/completions", json=asked(n=1, stream=True)) as other:
            lines = other.aiter_raw()
            idle = [await anext(lines) for _ in range(4)]  # meanwhile a stream has had its keep-alives
        assert b"\n\n" in b"".join(idle)
        assert not call.done()
        engine.go_on()
        answer = await call
    assert answer.content[:1] == b"{"
    assert int(answer.headers["content-length"]) == len(answer.content)
