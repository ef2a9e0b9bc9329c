"""Streams over WebSocket: the chunks and positions of HTTP, also after the gateway was killed within a stream."""

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest
import pytest_asyncio
from pagestream_gateway import ConnectionSettings, Settings, StreamSettings
from support.clients.gateway_clients import Address, get_events, write_keys
from support.engines.synthetic_engine import FAILING_TOKEN, MODEL, SyntheticEngine
from support.processes.fork_server import GATEWAYS, shared_server
from support.processes.stack import ForkedGateway, free_port
from support.processes.waiting import wait_until

pytestmark = [pytest.mark.served, pytest.mark.asyncio(loop_scope="module")]

COMPLETION: dict[str, Any] = {"model": MODEL, "prompt": "hello", "max_tokens": 20, "seed": 0, "stream": True}
TEXT = "abcdefghijklmnopqrst"
POST = "/v1/completions"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def web() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
        yield session


def text_of(chunks: list[dict[str, Any]]) -> str:
    """Return the text of chunks of a completion."""
    return "".join(choice["text"] for chunk in chunks for choice in chunk.get("choices", ()))


async def rest(socket: aiohttp.ClientWebSocketResponse) -> tuple[list[dict[str, Any]], int | None]:
    """Return what comes until the connection is closed, and the code."""
    return [json.loads(message.data) async for message in socket], socket.close_code


async def test_a_stream_and_its_positions_are_those_of_http(
    web: aiohttp.ClientSession, gateway: Address, other_gateway: Address, http: httpx.AsyncClient
) -> None:
    async with web.ws_connect(gateway.url + POST) as socket:
        await socket.send_json(COMPLETION)
        (opening, *chunks, done), code = await rest(socket)
    request_id = opening["headers"]["x-request-id"]
    assert (opening["status"], code, text_of(chunks)) == (200, 1000, TEXT)
    events = await get_events(http, request_id)
    assert done == {"done": True, "stream_position": events[-2].position}
    url = f"{other_gateway.url}/v1/requests/{request_id}/events"
    for place in (chunks[0]["stream_position"], chunks[-1]["stream_position"]):
        seen = [chunk for chunk in chunks if int(chunk["stream_position"].split("/")[1]) <= int(place.split("/")[1])]
        for options in ({"headers": {"Last-Event-ID": place}}, {"params": {"last_event_id": place}}):
            async with web.ws_connect(url, **options) as again:
                (_, *more, last), code = await rest(again)
            assert (text_of(seen) + text_of(more), last, code) == (TEXT, done, 1000)


async def test_a_body_that_is_not_streamed_is_one_message(web: aiohttp.ClientSession, gateway: Address) -> None:
    async with web.ws_connect(gateway.url + POST) as socket:
        await socket.send_str(json.dumps({**COMPLETION, "stream": False}))
        (_, answer), code = await rest(socket)
    assert (answer["choices"][0]["text"], code) == (TEXT, 1000)


async def test_errors_are_those_of_http(
    web: aiohttp.ClientSession, settings: Settings, engine: SyntheticEngine, another: Any
) -> None:
    small = replace(settings, limits=replace(settings.limits, max_body_bytes=60_000))
    async with another(small) as address:
        for changed, code, error in (
            ({"n": 0}, 4400, "invalid_value"),
            ({"model": "none"}, 4404, "model_not_found"),
            ({"prompt": [FAILING_TOKEN]}, 4500, "engine_error"),
            ({"user": "x" * 70_000}, 4413, "body_too_large"),
        ):
            async with web.ws_connect(address.url + POST) as socket:
                await socket.send_json({**COMPLETION, **changed})
                messages, closed = await rest(socket)
            assert closed == code
            assert [each["error"]["code"] for each in messages if "error" in each] == [error]


async def test_a_messages_events_end_as_a_chats_do(
    web: aiohttp.ClientSession, gateway: Address, http: httpx.AsyncClient
) -> None:
    for text, kind, expected in (("hello", "message_stop", 1000), (f"<unused{FAILING_TOKEN - 2}>", "error", 4500)):
        asked = {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 3}
        request_id = (await http.post("/v1/messages", json=asked)).headers["request-id"]
        async with web.ws_connect(f"{gateway.url}/v1/requests/{request_id}/events") as socket:
            messages, code = await rest(socket)
        types = [message["type"] for message in messages if "type" in message]
        assert (types[0], types[-1], code) == ("message_start", kind, expected)


async def test_misuse_is_closed_with_its_code(web: aiohttp.ClientSession, gateway: Address) -> None:
    async with web.ws_connect(gateway.url + POST) as socket:
        await socket.send_bytes(b"{}")
        assert (await rest(socket))[1] == 1003
    async with web.ws_connect(f"{gateway.url}/v1/requests/none/events") as socket:
        assert (await rest(socket))[1] == 4404
    with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
        await web.ws_connect(gateway.url + POST, headers={"Origin": "https://elsewhere.example"})
    assert refused.value.status == 403


async def test_a_get_that_does_not_ask_for_the_upgrade_gets_none(http: httpx.AsyncClient) -> None:
    handshake = {"Upgrade": "websocket", "Sec-WebSocket-Version": "13", "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA=="}
    answer = await http.get(POST, headers=handshake | {"Connection": "keep-alive"})
    assert answer.status_code == 405


async def test_keys_are_asked_for(
    web: aiohttp.ClientSession, settings: Settings, engine: SyntheticEngine, another: Any, tmp_path: Path
) -> None:
    keys = write_keys(tmp_path / "keys", {"key": "me"})
    async with another(replace(settings, gateway=replace(settings.gateway, api_keys=keys))) as address:
        async with web.ws_connect(address.url + POST) as socket:
            await socket.send_json(COMPLETION)
            assert (await rest(socket))[1] == 4401
        protocols = ("pagestream", "openai-insecure-api-key.key")
        async with web.ws_connect(address.url + POST, protocols=protocols) as socket:
            assert socket.protocol == "pagestream"
            await socket.send_json(COMPLETION)
            assert (await rest(socket))[1] == 1000


async def test_a_reader_that_leaves_ends_its_reading(
    web: aiohttp.ClientSession, engine: SyntheticEngine, settings: Settings, another: Any
) -> None:
    engine.hold_at = 1
    quick = replace(
        settings,
        stream=StreamSettings(disconnect_grace_s=0.2, keep_alive_s=0.05),
        connections=ConnectionSettings(body_timeout_s=1.0),
    )
    async with another(quick) as address:
        async with web.ws_connect(address.url + POST, autoping=False) as socket:
            await socket.send_json(COMPLETION)
            opening = await socket.receive_json()
            while (await socket.receive()).type is not aiohttp.WSMsgType.PING:
                pass
        async with httpx.AsyncClient(base_url=address.url) as client:
            view = {"state": ""}
            while view["state"] != "finished":
                view = (await client.get(f"/v1/requests/{opening['headers']['x-request-id']}")).json()
        assert view["finish_reason"] == "cancelled"
        async with web.ws_connect(address.url + POST) as silent:
            assert (await rest(silent))[1] == 1008


async def test_a_body_in_many_parts_has_the_time_of_one(
    engine: SyntheticEngine, settings: Settings, another: Any
) -> None:
    quick = replace(settings, connections=ConnectionSettings(body_timeout_s=0.5))
    head = f"GET {POST} HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    head += "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    async with another(quick) as address:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(address.url.rpartition(":")[2]))
        writer.write(head.encode() + b"\x01\x80" + bytes(4))  # a message of text begins
        assert b" 101 " in await reader.readuntil(b"\r\n\r\n")
        asking = asyncio.create_task(reader.readexactly(4))
        while not asking.done():
            writer.write(b"\x00\x80" + bytes(4))  # an empty part more
            await asyncio.wait([asking], timeout=0.1)
        writer.close()
    assert await asking == b"\x88\x02" + (1008).to_bytes(2)


async def test_a_call_whose_message_is_to_come_takes_no_room(
    web: aiohttp.ClientSession, http: httpx.AsyncClient, engine: SyntheticEngine, gateway: Address
) -> None:
    """Two bodies of unknown size may be held at once; more would be refused after some seconds."""
    async with AsyncExitStack() as sockets:
        for _ in range(8):
            await sockets.enter_async_context(web.ws_connect(gateway.url + POST))
        large = COMPLETION | {"prompt": "hello", "user": "x" * 100_000}
        answer = await http.post(POST, json=large)
    assert answer.status_code == 200


async def test_a_stream_goes_on_elsewhere_after_its_gateway_was_killed(
    web: aiohttp.ClientSession, engine: SyntheticEngine, redis_url: str, other_gateway: Address, tmp_path: Path
) -> None:
    engine.hold_at = 5
    port = free_port()
    command = ["pagestream_gateway.__main__", "--redis", redis_url, "--http-port", str(port), "--grpc-port", "0"]
    killed = ForkedGateway("killed", command, tmp_path / "log", server=shared_server(*GATEWAYS), http_port=port)
    killed.start()
    try:
        await asyncio.to_thread(wait_until, killed.has_become_ready, limit_s=60.0, what=killed.name)
        chunks: list[dict[str, Any]] = []
        async with web.ws_connect(killed.url + POST) as socket:
            await socket.send_json(COMPLETION)
            opening = await socket.receive_json()
            while len(text_of(chunks)) < 5:
                chunks.append(await socket.receive_json())
            killed.signal(signal.SIGKILL)
            more, code = await rest(socket)
        assert (more, code) == ([], 1006)
    finally:
        killed.kill()
    engine.go_on()
    url = f"{other_gateway.url}/v1/requests/{opening['headers']['x-request-id']}/events"
    async with web.ws_connect(url, params={"last_event_id": chunks[-1]["stream_position"]}) as socket:
        (_, *more, done), code = await rest(socket)
    assert (text_of(chunks) + text_of(more), done["done"], code) == (TEXT, True, 1000)
