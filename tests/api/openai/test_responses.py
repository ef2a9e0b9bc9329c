"""/v1/responses by the official client, over a real Redis with an engine that writes what the test asks for."""

import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio
from pagestream.v1.records_pb2 import ModelCard
from pagestream_gateway import Settings
from pydantic import BaseModel
from support.clients.gateway_clients import (
    Address,
    bearer,
    gateway_settings,
    post_events,
    running_address,
    sse_events,
    write_keys,
)
from support.engines.synthetic_engine import ECHO_MODEL, FAILING_TOKEN, SyntheticEngine, synthetic_card

pytestmark = [pytest.mark.served, pytest.mark.asyncio(loop_scope="module")]

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}<tool_call></tool_call>{% endif %}"
    "{% for m in messages %}{{ m.role }}({{ m.reasoning_content }}): {{ m.content }}"
    "{% for c in m.tool_calls or () %}{{ c.function.name }}({{ c.function.arguments.items() | list }}){% endfor %}"
    "{% endfor %}{% if think %}<think>{% endif %}"
)
WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": True,
}
OUTPUT = (
    "<think>\nTwo cities.\n</think>\n\nI look.\n"
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bergen"}}\n</tool_call>'
)


@pytest.fixture(scope="module")
def card() -> ModelCard:
    return synthetic_card(ECHO_MODEL, max_model_len=4096, chat_template=TEMPLATE)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_client(shared_gateway: Address) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{shared_gateway.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture
def client(shared_client: openai.AsyncOpenAI, engine: SyntheticEngine) -> openai.AsyncOpenAI:
    return shared_client


def asking_for(output: str, **more: Any) -> dict[str, Any]:
    return {"model": ECHO_MODEL, "input": f"[say]{output}[said]", "max_output_tokens": 1000, **more}


async def events_of(stream: Any) -> list[dict[str, Any]]:
    async with aclosing(stream.__aiter__()) as events:
        return [event.model_dump(exclude_unset=True) async for event in events]


async def test_an_answer_has_its_items(client: openai.AsyncOpenAI) -> None:
    response = await client.responses.create(
        **asking_for(OUTPUT, tools=[WEATHER], metadata={"a": "b"}, temperature=0.5)
    )
    reasoning, message, *calls = response.output
    assert reasoning.type == "reasoning"
    assert [part.text for part in reasoning.content or ()] == ["Two cities."]
    assert (message.type, response.output_text) == ("message", "I look.")
    assert [call.type == "function_call" and (call.name, call.arguments) for call in calls] == [
        ("get_weather", '{"city": "Oslo"}'),
        ("get_weather", '{"city": "Bergen"}'),
    ]
    assert (response.status, response.metadata, response.temperature) == ("completed", {"a": "b"}, 0.5)
    assert response.usage is not None
    assert response.usage.output_tokens == len(OUTPUT)
    assert response.usage.output_tokens_details.reasoning_tokens == OUTPUT.index("I look")
    assert await client.responses.retrieve(response.id) == response
    cut = await client.responses.create(**asking_for("abcdef") | {"max_output_tokens": 3})
    assert (cut.status, cut.output_text) == ("incomplete", "abc")
    assert cut.incomplete_details is not None
    assert cut.incomplete_details.reason == "max_output_tokens"


async def test_reasoning_may_be_left_out(client: openai.AsyncOpenAI) -> None:
    asked = asking_for(OUTPUT, tools=[WEATHER], extra_body={"include_reasoning": False})
    response = await client.responses.create(**asked)
    assert [item.type for item in response.output] == ["message", "function_call", "function_call"]
    assert response.output_text == "I look."
    assert response.usage is not None
    assert response.usage.output_tokens_details.reasoning_tokens == OUTPUT.index("I look")
    events = await events_of(await client.responses.create(**asked, stream=True))
    again = await client.responses.retrieve(events[0]["response"]["id"])
    assert not any("reasoning" in event["type"] for event in events)
    assert events[-1]["response"]["output"] == [item.model_dump(exclude_unset=True) for item in again.output]


async def test_a_stream_has_typed_events_from_any_of_them_on_any_gateway(
    client: openai.AsyncOpenAI, other_gateway: Address
) -> None:
    async with client.responses.stream(**asking_for(OUTPUT, tools=[WEATHER])) as stream:
        final = await stream.get_final_response()
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call", "function_call"]
    created = await client.responses.create(**asking_for(OUTPUT, tools=[WEATHER], stream=True))
    events = await events_of(created)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == [
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    last = events[-1]["response"]
    response_id = events[0]["response"]["id"]
    text = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    assert text == "I look."
    assert last == (await client.responses.retrieve(response_id)).model_dump(exclude_unset=True)
    other = client.with_options(base_url=f"{other_gateway.url}/v1")
    for after in (0, 40, len(events) - 1):
        rest = await other.responses.retrieve(response_id, stream=True, starting_after=after)
        assert await events_of(rest) == events[after + 1 :]


async def test_a_background_response_goes_on_alone_and_is_cancelled(
    client: openai.AsyncOpenAI, engine: SyntheticEngine
) -> None:
    engine.hold_at = 3
    kept, ended = [await client.responses.create(**asking_for("abcdef", background=True)) for _ in range(2)]
    assert kept.status in ("queued", "in_progress")
    stream = await client.responses.retrieve(kept.id, stream=True)
    async with aclosing(stream.__aiter__()) as events:
        async for event in events:
            if event.type == "response.output_text.delta":
                break
    cancelled = await client.responses.cancel(ended.id)
    assert (cancelled.status, (await client.responses.retrieve(ended.id)).status) == ("cancelled", "cancelled")
    with pytest.raises(openai.BadRequestError, match="has not ended"):
        await client.responses.create(**asking_for("x", previous_response_id=kept.id))
    engine.go_on()
    *_, last = await events_of(await client.responses.retrieve(kept.id, stream=True))
    found = await client.responses.retrieve(kept.id)
    assert (last["type"], found.status) == ("response.completed", "completed")
    assert found.output_text == "abcdef"


async def test_a_position_proves_what_was_read(http: httpx.AsyncClient, engine: SyntheticEngine) -> None:
    response_id, events = await post_events(http, "/v1/responses", asking_for("abcdef"))
    bodies = [event.body for event in events]
    path = f"/v1/responses/{response_id}?stream=true"
    for place in (1, 6, len(bodies) - 1):
        headers = {"Last-Event-ID": bodies[place]["stream_position"]}
        for more in ("", f"&starting_after={place}"):
            async with http.stream("GET", path + more, headers=headers) as answer:
                assert "x-stream-verified" not in answer.headers
                assert [event.body async for event in sse_events(answer)] == bodies[place + 1 :]
    refused = await http.get(path, headers={"Last-Event-ID": f"{response_id}/4/0123456789abcdef"})
    assert refused.json()["error"]["code"] == "digest_mismatch"
    engine.hold_at = 2
    running = await http.post("/v1/responses", json=asking_for("abcdef", background=True))
    path = f"/v1/responses/{running.json()['id']}"
    headers = {"Last-Event-ID": f"{running.json()['id']}/4/0123456789abcdef"}
    async with http.stream("GET", f"{path}?stream=true", headers=headers) as answer:
        engine.go_on()
        [error] = [event.body async for event in sse_events(answer)]
    assert (error["type"], error["code"]) == ("error", "digest_mismatch")


async def test_log_probabilities_stand_beside_the_text(client: openai.AsyncOpenAI) -> None:
    body = asking_for("abc", top_logprobs=1, include=["message.output_text.logprobs"])
    events = await events_of(await client.responses.create(**body, stream=True))
    deltas = [each for event in events if event["type"].endswith("delta") for each in event["logprobs"]]
    [done] = [event for event in events if event["type"] == "response.output_text.done"]
    [item] = events[-1]["response"]["output"]
    assert deltas == done["logprobs"] == item["content"][0]["logprobs"]
    found = await client.responses.retrieve(events[-1]["response"]["id"])
    assert found.model_dump(exclude_unset=True)["output"] == [item]


async def test_a_deleted_response_is_gone(
    client: openai.AsyncOpenAI, engine: SyntheticEngine, http: httpx.AsyncClient
) -> None:
    engine.hold_at = 2
    kept, deleted = [await client.responses.create(**asking_for("abcdef", background=True)) for _ in range(2)]
    await client.responses.delete(deleted.id)
    for call in (client.responses.retrieve(deleted.id), client.responses.delete(deleted.id)):
        with pytest.raises(openai.NotFoundError):
            await call
    with pytest.raises(openai.BadRequestError, match="does not exist"):
        await client.responses.create(**asking_for("x", previous_response_id=deleted.id))
    for path in ("", "/events", "/answer"):
        assert (await http.get(f"/v1/requests/{deleted.id}{path}")).status_code == 404
    listed = [each["id"] for each in (await http.get("/v1/requests")).json()["data"]]
    assert (listed[0], deleted.id in listed) == (kept.id, False)
    engine.go_on()
    *_, last = await events_of(await client.responses.retrieve(kept.id, stream=True))
    assert last["response"]["output"][0]["content"][0]["text"] == "abcdef"


async def test_a_deleted_response_frees_its_key(client: openai.AsyncOpenAI, http: httpx.AsyncClient) -> None:
    headers = {"Idempotency-Key": "of-a-deleted-response"}
    first, again = [await client.responses.create(**asking_for("abcdef"), extra_headers=headers) for _ in range(2)]
    assert again.id == first.id
    await client.responses.delete(first.id)
    made = await client.responses.create(**asking_for("abcdef"), extra_headers=headers)
    assert made.id != first.id
    assert made.output_text == "abcdef"
    assert (await http.get(f"/v1/responses/{first.id}")).status_code == 404
    joined = await client.responses.create(**asking_for("abcdef"), extra_headers=headers)
    assert joined.id == made.id


async def test_streams_hold_their_text_within_the_memory_of_whole_answers(
    engine: SyntheticEngine, settings: Settings, another: Callable[[Settings], AbstractAsyncContextManager[Address]]
) -> None:
    small = replace(settings, stream=replace(settings.stream, whole_answers_bytes=40))
    async with another(small) as address, httpx.AsyncClient(base_url=address.url) as http:
        _, events = await post_events(http, "/v1/responses", asking_for("a" * 100, stream=True))
        last = events[-1].body
        assert (last["type"], last["code"]) == ("error", "overloaded")
        path = f"/v1/responses/{events[0].body['response']['id']}?stream=true&starting_after={last['sequence_number']}"
    async with another(settings) as address, httpx.AsyncClient(base_url=address.url) as http:
        async with http.stream("GET", path) as answer:
            rest = [event.body async for event in sse_events(answer)]
    deltas = [event.body["delta"] for event in events[:-1] if "delta" in event.body]
    assert "".join([*deltas, *(event["delta"] for event in rest if "delta" in event)]) == "a" * 100


async def test_conversations_go_on_by_id_or_by_items(client: openai.AsyncOpenAI, engine: SyntheticEngine) -> None:
    first = await client.responses.create(**asking_for(OUTPUT, tools=[WEATHER], instructions="Be kind."))
    results: list[Any] = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "7 degrees"}
        for item in first.output
        if item.type == "function_call"
    ]
    said = {"role": "user", "content": [{"type": "input_text", "text": "[say]ok[said]"}]}
    second = await client.responses.create(
        model=ECHO_MODEL, input=[*results, said], previous_response_id=first.id, max_output_tokens=5
    )
    assert (second.output_text, second.previous_response_id, second.instructions) == ("ok", first.id, None)
    asked = {"role": "user", "content": f"[say]{OUTPUT}[said]"}
    again = await client.responses.create(
        model=ECHO_MODEL,
        input=[asked, *(item.model_dump(exclude_none=True) for item in first.output), *results, said],
        max_output_tokens=5,
    )
    assert again.output_text == "ok"
    specs = {spec.request_id: spec for spec in engine.claimed}
    assert specs[second.id].prompts == specs[again.id].prompts
    third = await client.responses.create(**asking_for("end", previous_response_id=second.id))
    items = [item async for item in client.responses.input_items.list(third.id, order="asc", limit=3)]
    assert [item.type for item in items] == [
        *("message", "reasoning", "message", "function_call", "function_call"),
        *("function_call_output", "function_call_output", "message", "message", "message"),
    ]


async def test_items_of_stored_responses_are_referred_to(
    client: openai.AsyncOpenAI, engine: SyntheticEngine, other_gateway: Address
) -> None:
    first = await client.responses.create(**asking_for(OUTPUT, tools=[WEATHER]))
    results: list[Any] = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "7 degrees"}
        for item in first.output
        if item.type == "function_call"
    ]
    said = {"role": "user", "content": "[say]ok[said]"}
    asked = [each async for each in client.responses.input_items.list(first.id, order="asc")]
    references: list[Any] = [{"type": "item_reference", "id": item.id} for item in [*asked, *first.output]]
    other = client.with_options(base_url=f"{other_gateway.url}/v1")
    body: dict[str, Any] = {"model": ECHO_MODEL, "max_output_tokens": 5}
    second = await other.responses.create(**body, input=[*references, *results, said])
    bare: list[Any] = [{"id": reference["id"]} for reference in references]
    again = await client.responses.create(**body, input=[*bare, *results, said])
    by_id = await client.responses.create(**body, input=[*results, said], previous_response_id=first.id)
    prompts = {spec.request_id: spec.prompts for spec in engine.claimed}
    assert prompts[second.id] == prompts[again.id] == prompts[by_id.id]
    third: Any = {**body, "input": [{"type": "item_reference", "id": second.output[0].id}, said]}
    assert (await client.responses.create(**third)).output_text == "ok"
    listed = [item.id async for item in client.responses.input_items.list(by_id.id, order="asc")]
    assert listed[1 : len(first.output) + 1] == [item.id for item in first.output]


async def test_what_may_not_be_read_may_not_be_referred_to(
    client: openai.AsyncOpenAI, engine: SyntheticEngine, redis_url: str, tmp_path: Path
) -> None:
    unstored = await client.responses.create(**asking_for("a", store=False))
    own, deleted = [await client.responses.create(**asking_for("a")) for _ in range(2)]
    await client.responses.delete(deleted.id)
    engine.hold_at = 2
    running = await client.responses.create(**asking_for("abcdef", background=True))
    names = [unstored.output[0].id, deleted.output[0].id, f"msg_{running.id}_0", f"msg_{own.id}_1", f"rs_{own.id}_0"]
    for name in names:
        with pytest.raises(openai.BadRequestError, match=r"not found") as caught:
            await client.responses.create(model=ECHO_MODEL, input=[{"type": "item_reference", "id": name}])
        assert caught.value.param == "input.0.id"
    engine.go_on()
    many: list[Any] = [{"type": "item_reference", "id": f"msg_{number}_0"} for number in range(600)]
    with pytest.raises(openai.BadRequestError, match="of 600 responses"):
        await client.responses.create(model=ECHO_MODEL, input=many)
    guarded = gateway_settings(redis_url, keys=write_keys(tmp_path / "keys", {"k": "another"}))
    asked = {"model": ECHO_MODEL, "input": [{"type": "item_reference", "id": own.output[0].id}]}
    async with running_address(guarded) as address, httpx.AsyncClient(base_url=address.url) as other:
        answer = await other.post("/v1/responses", json=asked, headers=bearer("k"))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input.0.id")


class Place(BaseModel):
    """What the answer is parsed to."""

    city: str


async def test_what_helpers_return_is_taken_back(client: openai.AsyncOpenAI, engine: SyntheticEngine) -> None:
    """Items as `parse` and `stream` give them, as objects and as dumps, and the members that repeat the body."""
    parsed = await client.responses.parse(**asking_for('{"city": "Oslo"}'), text_format=Place)
    assert parsed.output_parsed == Place(city="Oslo")
    async with client.responses.stream(**asking_for(OUTPUT, tools=[WEATHER])) as stream:
        streamed = await stream.get_final_response()
    said: Any = {"role": "user", "content": "[say]ok[said]"}
    for output in (parsed.output, streamed.output):
        forms: list[Any] = [output, [item.to_dict() for item in output]]
        forms += [[item.model_dump(by_alias=by_alias) for item in output] for by_alias in (False, True)]
        results: list[Any] = [
            {"type": "function_call_output", "call_id": item.call_id, "output": "7 degrees"}
            for item in output
            if item.type == "function_call"
        ]
        for form in forms:
            await client.responses.create(model=ECHO_MODEL, input=[*form, *results, said], max_output_tokens=5)
        prompts = [list(spec.prompts[0].ids) for spec in engine.claimed[-len(forms) :]]
        assert prompts == [prompts[0]] * len(forms)
    for first in (parsed, streamed):
        members = {
            name: getattr(first, name)
            for name in ("text", "tools", "tool_choice", "reasoning", "metadata", "truncation", "top_logprobs")
        }
        again = await client.responses.create(**asking_for("{}", **members))
        assert again.text == first.text
        assert again.tools == first.tools


async def test_a_response_has_what_open_responses_asks_for(
    client: openai.AsyncOpenAI, http: httpx.AsyncClient, engine: SyntheticEngine
) -> None:
    body = asking_for("a", extra_body={"presence_penalty": 0.5, "frequency_penalty": 0.25})
    first = (await client.responses.create(**body)).model_dump()
    assert (first["presence_penalty"], first["frequency_penalty"]) == (0.5, 0.25)
    assert first["created_at"] <= first["completed_at"]
    again = (await client.responses.retrieve(first["id"])).model_dump()
    assert again["completed_at"] == first["completed_at"]
    cut = await client.responses.create(**asking_for("abcdef") | {"max_output_tokens": 3})
    engine.hold_at = 2
    ended = await client.responses.create(**asking_for("abcdef", background=True))
    assert (cut.completed_at, ended.completed_at) == (None, None)
    assert (await client.responses.cancel(ended.id)).completed_at is None
    engine.go_on()
    answer = await http.post("/v1/responses/compact", json={"input": "a"})
    assert answer.status_code == 404


async def test_an_answer_may_be_held_to_a_schema(client: openai.AsyncOpenAI, engine: SyntheticEngine) -> None:
    form: Any = {"format": {"type": "json_schema", "name": "a", "schema": {"type": "object"}, "strict": True}}
    answer = await client.responses.create(**asking_for("{}", text=form))
    assert answer.output_text == "{}"
    assert engine.claimed[-1].sampling.structured_outputs.json == '{"type": "object"}'
    assert answer.model_dump(by_alias=True)["text"]["format"]["schema"] == {"type": "object"}
    forced = await client.responses.create(
        **asking_for('{"city": "Oslo"}', tools=[WEATHER], tool_choice={"type": "function", "name": "get_weather"})
    )
    assert [item.type == "function_call" and item.arguments for item in forced.output] == ['{"city": "Oslo"}']


async def test_a_failure_is_the_responses_own(client: openai.AsyncOpenAI) -> None:
    """The failing token is a special one of the synthetic tokenizer, which a prompt may spell."""
    body = {"model": ECHO_MODEL, "input": f"<unused{FAILING_TOKEN - 2}>"}
    with pytest.raises(openai.InternalServerError, match="told to fail"):
        await client.responses.create(**body)
    stream = await client.responses.create(**body, stream=True)
    *_, last = await events_of(stream)
    assert (last["type"], last["response"]["error"]["code"]) == ("response.failed", "server_error")
    found = await client.responses.retrieve(last["response"]["id"])
    assert found.status == "failed"


REFUSED: list[tuple[dict[str, Any], str | None]] = [
    ({"conversation": "c"}, "conversation"),
    ({"max_tokens": 3}, "max_tokens"),
    ({"truncation": "some"}, "truncation"),
    ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
    ({"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}}, "tool_choice"),
    ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
    ({"top_logprobs": -1}, "top_logprobs"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0.id"),
    ({"input": [{"type": "item_reference", "id": "msg_2a97516c-0000-00_0"}]}, "input.0.id"),
    ({"input": [{"type": "computer_call"}]}, "input.0.type"),
    ({"model": None}, "model"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content"),
    ({"input": []}, "input"),
    (
        {"input": [{"type": "reasoning", "content": [{"type": "reasoning_text", "text": "\ud800"}]}]},
        "input.0.content.0.text",
    ),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "x"}}}}, "text.format"),
    ({"background": True, "store": False}, "background"),
    ({"previous_response_id": "none"}, "previous_response_id"),
    ({"max_tool_calls": "NESTED"}, None),
]


async def test_what_is_not_supported_is_refused_by_name(http: httpx.AsyncClient) -> None:
    nested = "[" * 300 + "]" * 300
    for more, field in REFUSED:
        body = json.dumps(asking_for("x") | more).replace('"NESTED"', nested)
        answer = await http.post("/v1/responses", content=body, headers={"Content-Type": "application/json"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, field), answer.text


async def test_a_conversation_has_no_more_bytes_than_a_body(
    client: openai.AsyncOpenAI, redis_url: str, gateway: Address
) -> None:
    """Also where none of it is shown to the model."""
    hidden: Any = {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "x" * 100}]}
    hidden["content"] = [{"type": "reasoning_text", "text": "x" * 900}]
    first = await client.responses.create(
        **asking_for("a") | {"input": [hidden, {"role": "user", "content": "[say]a[said]"}]}
    )
    small = gateway_settings(redis_url)
    small = replace(small, limits=replace(small.limits, max_body_bytes=1000))
    async with running_address(small) as address, httpx.AsyncClient(base_url=address.url) as other:
        answer = await other.post("/v1/responses", json=asking_for("b", previous_response_id=first.id))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input"), answer.text


async def test_what_follows_the_last_event_is_an_error(client: openai.AsyncOpenAI, http: httpx.AsyncClient) -> None:
    made = await client.responses.create(**asking_for("a"))
    url = f"/v1/responses/{made.id}?stream=true"
    last = [line for line in (await http.get(url)).text.splitlines() if line.startswith("data: ")][-1]
    number = json.loads(last.removeprefix("data: "))["sequence_number"]
    after = await http.get(f"{url}&starting_after={number}")
    assert (after.text, after.headers["X-Stream-Verified"]) == ("", "false")
    beyond = (await http.get(f"{url}&starting_after={number + 1}")).text
    assert '"type":"error"' in beyond
    assert '"param":"starting_after"' in beyond


async def test_others_requests_are_not_found(http: httpx.AsyncClient, redis_url: str, tmp_path: Path) -> None:
    chat = {"model": ECHO_MODEL, "messages": [{"role": "user", "content": "[say]x[said]"}]}
    of_chat = (await http.post("/v1/chat/completions", json=chat)).json()["id"]
    unstored = (await http.post("/v1/responses", json=asking_for("x", store=False))).json()["id"]
    own = (await http.post("/v1/responses", json=asking_for("x"))).json()["id"]
    guarded = gateway_settings(redis_url, keys=write_keys(tmp_path / "keys", {"k": "another"}))
    async with running_address(guarded) as address, httpx.AsyncClient(base_url=address.url) as other:
        answers = [await other.get(f"/v1/responses/{own}", headers=bearer("k"))]
        answers.append(await other.post(f"/v1/responses/{own}/cancel", headers=bearer("k")))
    for response_id in (of_chat, unstored):
        answers += [await http.get(f"/v1/responses/{response_id}")]
    assert [answer.status_code for answer in answers] == [404] * 4
    assert (await http.get(f"/v1/responses/{own}")).json()["status"] == "completed"
