"""Streams over HTTP: positions, ids, resuming on another gateway, cancelling."""

import asyncio
import socket
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import httpx
import pytest
from pagestream_gateway import Settings, ShutdownSettings
from support.clients.gateway_clients import Address, chat_text, get_events, lose, post_events, sse_events
from support.engines.synthetic_engine import MODEL, SyntheticEngine
from support.processes.waiting import LIMIT_S
from support.protocol.token_streams import eventually

pytestmark = [pytest.mark.served, pytest.mark.asyncio(loop_scope="module")]

CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 20, "seed": 0}
TEXT = "abcdefghijklmnopqrst"
NUM_ENTRIES = 22  # tokens, finish, end


async def test_positions_count_log_entries(http: httpx.AsyncClient) -> None:
    request_id, events = await post_events(
        http, "/v1/chat/completions", {**CHAT, "stream_options": {"include_usage": True}}
    )
    assert events[0].position == f"{request_id}/0/"
    indices = [event.next_index for event in events[:-1]]
    assert indices == sorted(set(indices))
    assert events[-2].next_index == NUM_ENTRIES
    assert events[-1].data == "[DONE]"
    assert {event.body["id"] for event in events[:-1]} == {request_id}
    assert {event.id for event in events} == {""}
    assert chat_text(events) == TEXT


async def test_ids_repeat_the_positions_where_they_are_asked_for_and_on_every_resume(http: httpx.AsyncClient) -> None:
    answer = await http.post("/v1/chat/completions", json={**CHAT, "stream": True}, headers={"X-Stream-Ids": "true"})
    events = [event async for event in sse_events(answer)]
    again = await get_events(http, answer.headers["X-Request-Id"])
    for seen in (events, again):
        assert [event.id for event in seen[:-1]] == [event.position for event in seen[:-1]]
        assert (seen[-1].id, seen[-1].data) == (seen[-2].id, "[DONE]"), "[DONE] repeats the last id"
    assert again[0] == events[0]
    refused = await http.post("/v1/chat/completions", json={**CHAT, "stream": True}, headers={"X-Stream-Ids": "1"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "X-Stream-Ids")


async def test_another_gateway_goes_on_after_each_event(http: httpx.AsyncClient, other_gateway: Address) -> None:
    request_id, events = await post_events(
        http, "/v1/chat/completions", {**CHAT, "stream_options": {"include_usage": True}}
    )
    async with httpx.AsyncClient(base_url=other_gateway.url) as other:
        for number, event in enumerate(events[:-1]):
            more = await get_events(other, request_id, after=event.position)
            assert chat_text(events[: number + 1]) + chat_text(more) == TEXT
            assert (more[-1].data, more[-1].id) == ("[DONE]", events[-2].position)
        whole = await get_events(other, request_id)
    assert whole[0].data == events[0].data
    assert chat_text(whole) == TEXT


async def test_from_counts_entries(http: httpx.AsyncClient) -> None:
    request_id, _ = await post_events(http, "/v1/chat/completions", CHAT)
    for index in range(1, NUM_ENTRIES + 1):
        assert chat_text(await get_events(http, request_id, query=f"?from={index}")) == TEXT[index:]
    past = await http.get(f"/v1/requests/{request_id}/events?from={NUM_ENTRIES + 1}")
    assert (past.status_code, past.json()["error"]["param"]) == (416, "from")
    assert past.json()["error"]["code"] == "offset_out_of_range"


async def test_a_digest_that_differs_is_never_spliced(http: httpx.AsyncClient, engine: SyntheticEngine) -> None:
    request_id, _ = await post_events(http, "/v1/chat/completions", CHAT)
    for index in (0, 1, 10, NUM_ENTRIES - 1, NUM_ENTRIES):
        answer = await http.get(
            f"/v1/requests/{request_id}/events", headers={"Last-Event-ID": f"{request_id}/{index}/0123456789abcdef"}
        )
        assert answer.status_code == 409, index
        assert answer.json()["error"]["code"] == "digest_mismatch"


PLACES = ("nonsense", "{id}/x/", "{id}/-1/", "other/3/", "{id}/3", "{id}/99999999999999999999999/", "{id}/1.5/")
INDICES = ("x", "-1", "1.5", "1e3", "\u0663", str(2**63))


async def test_a_place_that_is_wrong_is_named_by_where_it_came_from(http: httpx.AsyncClient) -> None:
    request_id, _ = await post_events(http, "/v1/chat/completions", CHAT)
    path = f"/v1/requests/{request_id}/events"
    for place in PLACES:
        answer = await http.get(path, headers={"Last-Event-ID": place.format(id=request_id)})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "Last-Event-ID"), place
    for index in INDICES:
        answer = await http.get(path, params={"from": index})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "from"), index
    for place, status in (("99/", 416), ("2/0123456789abcdef", 409)):
        answer = await http.get(path, headers={"Last-Event-ID": f"{request_id}/{place}"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (status, "Last-Event-ID")


async def test_a_stream_goes_on_elsewhere_while_it_is_made(
    http: httpx.AsyncClient, other_gateway: Address, engine: SyntheticEngine
) -> None:
    engine.hold_at = 5
    seen = []
    async with http.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}) as response:
        request_id = response.headers["X-Request-Id"]
        async for event in sse_events(response):
            seen.append(event)
            if event.next_index == 5:
                break
    view = (await http.get(f"/v1/requests/{request_id}")).json()
    assert (view["state"], view["next_index"], view["finish_reason"], view["attempts"]) == ("running", 5, None, 1)
    async with httpx.AsyncClient(base_url=other_gateway.url) as other:
        reading = asyncio.create_task(get_events(other, request_id, after=seen[-1].position))
        engine.go_on()
        more = await reading
    assert chat_text(seen) + chat_text(more) == TEXT
    assert (await http.get(f"/v1/requests/{request_id}")).json()["state"] == "finished"


async def test_delete_cancels_and_the_stream_says_so(http: httpx.AsyncClient, engine: SyntheticEngine) -> None:
    engine.hold_at = 3
    events = []
    async with http.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}) as response:
        request_id = response.headers["X-Request-Id"]
        async for event in sse_events(response):
            events.append(event)
            if event.next_index == 3:
                view = (await http.delete(f"/v1/requests/{request_id}")).json()
                assert (view["state"], view["finish_reason"]) == ("finished", "cancelled")
    finishes = [choice["finish_reason"] for event in events[:-1] for choice in event.body["choices"]]
    assert finishes[-1] == "cancelled"
    assert chat_text(events) == "abc"
    assert (await http.delete(f"/v1/requests/{request_id}")).json()["finish_reason"] == "cancelled"


async def test_completions_keep_their_form(http: httpx.AsyncClient) -> None:
    body = {"model": MODEL, "prompt": ["x", "y"], "max_tokens": 2, "seed": 0, "echo": True}
    request_id, events = await post_events(http, "/v1/completions", body)
    again = await get_events(http, request_id)
    for seen in (events, again):
        texts = {0: "", 1: ""}
        for event in seen[:-1]:
            assert event.body["object"] == "text_completion"
            for choice in event.body["choices"]:
                texts[choice["index"]] += choice["text"]
        assert texts == {0: "xab", 1: "yhi"}


async def test_a_stopping_gateway_tells_its_streams_to_go_on_elsewhere(
    http: httpx.AsyncClient, engine: SyntheticEngine, settings: Settings, another: Any
) -> None:
    engine.hold_at = 4
    seen = []
    async with httpx.AsyncClient() as client:
        async with another(settings) as address:
            call = client.stream("POST", f"{address.url}/v1/chat/completions", json={**CHAT, "stream": True})
            response = await call.__aenter__()
            events = sse_events(response)
            while not seen or seen[-1].next_index < 4:
                seen.append(await anext(events))
        rest = [event async for event in events]
        await call.__aexit__(None, None, None)
    assert [event.body["error"]["code"] for event in rest] == ["gateway_stopping"]
    engine.go_on()
    request_id = response.headers["X-Request-Id"]
    assert chat_text(seen) + chat_text(await get_events(http, request_id, after=rest[-1].position)) == TEXT


async def test_a_client_that_is_behind_when_its_gateway_stops_misses_nothing(
    http: httpx.AsyncClient, engine: SyntheticEngine, settings: Settings, another: Any
) -> None:
    many = {**CHAT, "n": 8, "max_tokens": 100}
    engine.forget()
    narrow = httpx.AsyncHTTPTransport(socket_options=[(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)])
    async with httpx.AsyncClient(transport=narrow) as client, AsyncExitStack() as gateways:
        address = await gateways.enter_async_context(another(replace(settings, shutdown=ShutdownSettings(drain_s=0.1))))
        call = client.stream("POST", f"{address.url}/v1/chat/completions", json={**many, "stream": True})
        response = await call.__aenter__()
        events = sse_events(response)
        seen = [await anext(events)]
        await eventually(lambda: engine.num_tokens >= 800)  # of which the client reads none meanwhile
        stopping = asyncio.create_task(gateways.aclose())
        with pytest.raises(TimeoutError):  # the answer has been ended, and its last event waits for the client
            await asyncio.wait_for(asyncio.shield(stopping), 1)
        seen += [event async for event in events]
        await stopping
        await call.__aexit__(None, None, None)
    last = seen.pop()
    assert last.body["error"]["code"] == "gateway_stopping"
    more = await get_events(http, response.headers["X-Request-Id"], after=last.position)
    whole = await get_events(http, response.headers["X-Request-Id"])
    assert last.next_index < 400, "the client was not behind"
    for choice in range(8):
        assert chat_text(seen, choice) + chat_text(more, choice) == chat_text(whole, choice)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_request_that_redis_loses_while_it_is_read_goes_on(
    http: httpx.AsyncClient, engine: SyntheticEngine, redis_url: str, stream: bool
) -> None:
    engine.hold_at = 10
    asking = asyncio.create_task(http.post("/v1/chat/completions", json={**CHAT, "stream": stream}))
    await eventually(lambda: bool(engine.claimed))
    request_id = engine.claimed[0].request_id

    async def has_come_so_far() -> bool:
        return (await http.get(f"/v1/requests/{request_id}")).json()["next_index"] == 10

    await eventually(has_come_so_far)
    await lose(redis_url, request_id)
    engine.go_on()
    async with asyncio.timeout(LIMIT_S):
        answer = await asking
    assert answer.headers["X-Request-Id"] == request_id
    if stream:
        assert chat_text([event async for event in sse_events(answer)]) == TEXT
    else:
        assert answer.json()["choices"][0]["message"]["content"] == TEXT
    assert [spec.request_id for spec in engine.claimed] == [request_id, request_id]
