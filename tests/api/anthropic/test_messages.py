"""/v1/messages by the official client, over a real Redis with an engine that writes what the test asks for."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import pytest_asyncio
from pagestream.v1.records_pb2 import ModelCard
from pydantic import BaseModel
from support.clients.gateway_clients import (
    Address,
    gateway_settings,
    get_events,
    lose,
    post_events,
    running_address,
    write_keys,
)
from support.engines.synthetic_engine import (
    ECHO_MODEL,
    FAILING_TOKEN,
    SyntheticEngine,
    byte_tokenizer,
    synthetic_card,
    tokenizer_of,
)

if TYPE_CHECKING:
    import anthropic  # takes seconds: imported where it is used

pytestmark = [pytest.mark.served, pytest.mark.asyncio(loop_scope="module")]

TEMPLATE = (
    "{% if dumps %}{{ messages | tojson }}{% else %}"
    "{% if tools %}{{ tools | tojson }}<tool_call></tool_call>{% endif %}"
    "{% for m in messages %}{{ m.role }}({{ m.reasoning_content }}): {{ m.content }}"
    "{% for c in m.tool_calls or () %}{{ c.function.name }}({{ c.function.arguments.items() | list }}){% endfor %}"
    "{% endfor %}{% if enable_thinking %}<think>{% endif %}{% endif %}"
)
WEATHER: Any = {
    "name": "get_weather",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "cache_control": {"type": "ephemeral"},
}
OUTPUT = (
    "<think>\nTwo cities.\n</think>\n\nI look.\n"
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bergen"}}\n</tool_call>'
)
VERSION = {"anthropic-version": "2023-06-01"}


@pytest.fixture(scope="module")
def card() -> ModelCard:
    return synthetic_card(ECHO_MODEL, max_model_len=4096, chat_template=TEMPLATE)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_client(shared_gateway: Address) -> AsyncIterator[anthropic.AsyncAnthropic]:
    import anthropic

    async with anthropic.AsyncAnthropic(base_url=shared_gateway.url, api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture
def client(shared_client: anthropic.AsyncAnthropic, engine: SyntheticEngine) -> anthropic.AsyncAnthropic:
    return shared_client


def said(output: str) -> dict[str, Any]:
    return {"role": "user", "content": f"[say]{output}[said]"}


def asking_for(output: str, **more: Any) -> dict[str, Any]:
    return {"model": ECHO_MODEL, "messages": [said(output)], "max_tokens": 1000, **more}


async def test_reasoning_that_is_not_shown_comes_back(
    client: anthropic.AsyncAnthropic, engine: SyntheticEngine, card: ModelCard
) -> None:
    """In the signature of its block, as Anthropic's own, whole and streamed."""
    asked = asking_for(OUTPUT, tools=[WEATHER], thinking={"type": "adaptive", "display": "omitted"})
    message = await client.messages.create(**asked)
    thinking, *_, use = blocks = [block.model_dump(exclude_none=True) for block in message.content]
    assert thinking["thinking"] == ""
    assert "Two cities." not in thinking["signature"]
    async with client.messages.stream(**asked) as stream:
        streamed = (await stream.get_final_message()).content[0].model_dump(exclude_none=True)
    assert streamed == thinking
    results = [
        {"type": "tool_result", "tool_use_id": each["id"], "content": "Rain."}
        for each in blocks
        if each["type"] == "tool_use"
    ]
    for signature, is_known in ((thinking["signature"], True), ("x", False), (f"{thinking['signature']}!", False)):
        blocks[0] = {**thinking, "signature": signature}
        turns = [*asked["messages"], {"role": "assistant", "content": blocks}, {"role": "user", "content": results}]
        await client.messages.create(**{**asked, "messages": [*turns, said("Done.")]})
        prompt = tokenizer_of(card).decode(list(engine.claimed[-1].prompts[0].ids))
        assert ("assistant(Two cities.)" in prompt) is is_known, prompt
    assert use["name"] == "get_weather"


async def test_an_answer_has_its_blocks(client: anthropic.AsyncAnthropic, engine: SyntheticEngine) -> None:
    message = await client.messages.create(**asking_for(OUTPUT, tools=[WEATHER]))
    thinking, text, *calls = [block.model_dump(exclude_none=True) for block in message.content]
    assert thinking == {"type": "thinking", "thinking": "Two cities.", "signature": ""}
    assert text == {"type": "text", "text": "I look."}
    assert [(call["type"], call["name"], call["input"]) for call in calls] == [
        ("tool_use", "get_weather", {"city": "Oslo"}),
        ("tool_use", "get_weather", {"city": "Bergen"}),
    ]
    assert (message.stop_reason, message.stop_sequence, message.role) == ("tool_use", None, "assistant")
    assert message.usage.input_tokens == len(engine.claimed[-1].prompts[0].ids)
    assert (message.usage.output_tokens, message.usage.cache_read_input_tokens) == (len(OUTPUT), 0)
    assert message.id == message._request_id == engine.claimed[-1].request_id
    ends = [
        await client.messages.create(**asking_for("abcdef") | more)
        for more in ({}, {"max_tokens": 3}, {"stop_sequences": ["x", "y"]})
    ]
    assert [(end.stop_reason, end.stop_sequence) for end in ends] == [
        ("end_turn", None),
        ("max_tokens", None),
        ("stop_sequence", "x"),
    ]
    cut = await client.messages.create(**asking_for(OUTPUT, tools=[WEATHER]) | {"max_tokens": OUTPUT.index("slo")})
    *_, call = cut.content
    assert (cut.stop_reason, call.type) == ("max_tokens", "tool_use")


async def test_a_stream_is_the_whole_answer_in_events(client: anthropic.AsyncAnthropic) -> None:
    async with client.messages.stream(**asking_for(OUTPUT, tools=[WEATHER])) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_message()
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
    whole = await client.messages.create(**asking_for(OUTPUT, tools=[WEATHER]))

    def shown(message: Any) -> dict[str, Any]:
        blocks = [block.model_dump(exclude={"id", "parsed_output"}) for block in message.content]
        return {"content": blocks, **message.model_dump(include={"stop_reason", "stop_sequence", "usage", "model"})}

    assert shown(final) == shown(whole)


async def test_a_conversation_goes_on_with_results_and_a_beginning(
    client: anthropic.AsyncAnthropic, engine: SyntheticEngine
) -> None:
    async with client.messages.stream(**asking_for(OUTPUT, tools=[WEATHER])) as stream:
        first = await stream.get_final_message()
    results: Any = [
        {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "7 degrees"}]}
        for block in first.content
        if block.type == "tool_use"
    ]
    conversation: Any = [
        said("a"),
        {"role": "user", "content": "Please."},
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [*results, {"type": "text", "text": "[say]ok[said]"}]},
        {"role": "assistant", "content": "It is"},
    ]
    system: Any = [{"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}]
    asked: Any = {"model": ECHO_MODEL, "messages": conversation, "system": system}
    answer = await client.messages.create(**asked, max_tokens=9)
    assert [block.type == "text" and block.text for block in answer.content] == ["ok"]
    prompt = engine.claimed[-1].prompts[0].ids
    assert byte_tokenizer().decode(list(prompt)) == (
        "system(): Be kind.user(): [say]a[said]\nPlease."
        "assistant(Two cities.): I look.get_weather([('city', 'Oslo')])get_weather([('city', 'Bergen')])"
        "tool(): 7 degreestool(): 7 degreesuser(): [say]ok[said]assistant(): It is"
    )
    assert (await client.messages.count_tokens(**asked)).input_tokens == len(prompt)


async def test_a_message_has_all_that_clients_expect(client: anthropic.AsyncAnthropic) -> None:
    """Members that the published schema of Anthropic's API requires."""
    from anthropic.types import DirectCaller

    asked = asking_for(OUTPUT, tools=[WEATHER])
    whole = await client.messages.create(**asked)
    async with client.messages.stream(**asked) as stream:
        streamed = await stream.get_final_message()
    for message in (whole, streamed):
        assert {"container", "stop_details"} <= message.model_fields_set
        _, text, call, _ = message.content
        assert text.type == "text"
        assert {"citations"} <= text.model_fields_set
        assert call.type == "tool_use"
        assert call.caller == DirectCaller(type="direct")
        usage = message.usage
        assert {"inference_geo", "server_tool_use"} <= usage.model_fields_set
        assert usage.cache_creation is not None
        assert usage.cache_creation.model_dump() == {"ephemeral_1h_input_tokens": 0, "ephemeral_5m_input_tokens": 0}
        assert usage.output_tokens_details is not None
        assert usage.output_tokens_details.thinking_tokens == OUTPUT.index("I look")


class Place(BaseModel):
    """What the answer is parsed to."""

    city: str


async def test_what_helpers_return_is_taken_back(client: anthropic.AsyncAnthropic, engine: SyntheticEngine) -> None:
    """Blocks as `parse` and `stream` give them, as objects and as dumps; and whole messages."""
    parsed = await client.messages.parse(**asking_for('{"city": "Oslo"}'), output_format=Place)
    assert parsed.parsed_output == Place(city="Oslo")
    async with client.beta.messages.stream(**asking_for(OUTPUT, tools=[WEATHER])) as stream:
        streamed = await stream.get_final_message()
    for message in (parsed, streamed):
        contents: list[Any] = [message.content, [block.model_dump() for block in message.content]]
        turns: list[Any] = [{"role": "assistant", "content": content} for content in contents]
        turns += [message, message.model_dump(), message.to_dict()]
        results: Any = [
            {"type": "tool_result", "tool_use_id": block.id, "content": "7 degrees"}
            for block in message.content
            if block.type == "tool_use"
        ]
        answered = {"role": "user", "content": [*results, {"type": "text", "text": "[say]ok[said]"}]}
        for turn in turns:
            await client.messages.create(model=ECHO_MODEL, messages=[said("a"), turn, answered], max_tokens=5)
        prompts = [list(spec.prompts[0].ids) for spec in engine.claimed[-len(turns) :]]
        assert prompts == [prompts[0]] * len(turns)


async def test_a_tool_runner_goes_on_without_a_thread(
    client: anthropic.AsyncAnthropic, http: httpx.AsyncClient, engine: SyntheticEngine
) -> None:
    import anthropic

    @anthropic.beta_async_tool
    async def get_weather(city: str) -> str:
        """Weather of a city."""
        return f"[say]Rain in {city}.[said]"

    # The engine says what the prompt asks for last: a call, and then what the tool returned.
    runner = client.beta.messages.tool_runner(**asking_for(OUTPUT), tools=[get_weather], max_iterations=2)
    kinds = [[block.type for block in message.content] async for message in runner]
    assert kinds == [["thinking", "text", "tool_use", "tool_use"], ["text"]]
    num_turns = len(engine.claimed)
    refused = await http.post("/v1/messages", json=asking_for("a", thread={"type": "create"}))
    error = refused.json()["error"]
    assert (refused.status_code, error["details"]) == (400, {"error_code": "thread_unsupported_request"})
    assert error["message"].startswith("thread: ")
    assert len(engine.claimed) == num_turns
    count = {"model": ECHO_MODEL, "messages": [said("a")], "thread": None}
    assert (await http.post("/v1/messages/count_tokens", json=count)).status_code == 200


async def messages_of(http: httpx.AsyncClient, engine: SyntheticEngine, messages: Any, system: Any = None) -> Any:
    """Return the messages that the template gets."""
    asked = {"model": ECHO_MODEL, "messages": messages, "max_tokens": 1, "chat_template_kwargs": {"dumps": True}}
    if system is not None:
        asked["system"] = system
    answer = await http.post("/v1/messages", json=asked)
    assert answer.status_code == 200, answer.text
    return json.loads(byte_tokenizer().decode(list(engine.claimed[-1].prompts[0].ids)))


async def test_neighbours_of_one_role_are_one_message(http: httpx.AsyncClient, engine: SyntheticEngine) -> None:
    """Many templates refuse roles that don't alternate; results of tools stay apart, each with its call."""
    use = [{"type": "tool_use", "id": name, "name": "f", "input": {"of": name}} for name in "xy"]
    results = [{"type": "tool_result", "tool_use_id": name, "content": f"of {name}"} for name in "xy"]
    given: list[dict[str, Any]] = [
        {"role": "user", "content": "a"},
        {"role": "user", "content": [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "t", "signature": "s"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "d"}, *use]},
        {"role": "user", "content": [*results, {"type": "text", "text": "e"}]},
        {"role": "system", "content": "f"},
    ]
    calls = [{"id": n, "type": "function", "function": {"name": "f", "arguments": {"of": n}}} for n in "xy"]
    found = await messages_of(http, engine, given, "s")
    assert [{name: value for name, value in each.items() if name != "reasoning"} for each in found] == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a\nb\nc"},
        {"role": "assistant", "content": "d", "reasoning_content": "t", "tool_calls": calls},
        {"role": "tool", "content": "of x", "tool_call_id": "x"},
        {"role": "tool", "content": "of y", "tool_call_id": "y"},
        {"role": "user", "content": "e"},
        {"role": "system", "content": "f"},
    ]


async def test_a_system_prompt_loses_its_billing_header_alone(http: httpx.AsyncClient, engine: SyntheticEngine) -> None:
    said_a = [{"role": "user", "content": "a"}]
    headers = [{"type": "text", "text": text} for text in ("x-anthropic-billing-header: 1\nx", "Be brief.")]
    for system, kept in (
        (
            "x-anthropic-billing-header: cch=1\nBe brief.\nBe kind.",
            [{"role": "system", "content": "Be brief.\nBe kind."}],
        ),
        (headers, [{"role": "system", "content": "Be brief."}]),
        ("x-anthropic-billing-header: 1", []),
    ):
        assert await messages_of(http, engine, said_a, system) == [*kept, *said_a]
    empty = [*said_a, {"role": "assistant", "content": []}, *said_a]
    assert await messages_of(http, engine, empty) == [*said_a, {"role": "assistant", "content": ""}, *said_a]


async def test_what_is_asked_of_the_output_reaches_the_engine(
    client: anthropic.AsyncAnthropic, engine: SyntheticEngine
) -> None:
    called = await client.messages.create(
        **asking_for('{"city": "Oslo"}', tools=[WEATHER], tool_choice={"type": "tool", "name": "get_weather"})
    )
    assert [block.type == "tool_use" and block.input for block in called.content] == [{"city": "Oslo"}]
    assert (called.stop_reason, json.loads(engine.claimed[-1].sampling.structured_outputs.json)) == (
        "tool_use",
        WEATHER["input_schema"],
    )
    alone: Any = {"type": "any", "disable_parallel_tool_use": True}
    await client.messages.create(**asking_for("[]", tools=[WEATHER], tool_choice=alone))
    assert json.loads(engine.claimed[-1].sampling.structured_outputs.json)["maxItems"] == 1
    form: Any = {"format": {"type": "json_schema", "schema": {"type": "object"}}}
    more = {"temperature": 0.5, "top_p": 0.5, "top_k": 5, "seed": 3}
    await client.messages.create(**asking_for("{}", output_config=form), extra_body=more)
    sampling = engine.claimed[-1].sampling
    assert (sampling.structured_outputs.json, sampling.temperature, sampling.top_p) == ('{"type": "object"}', 0.5, 0.5)
    assert (sampling.top_k, sampling.seed, list(sampling.stop)) == (5, 3, [])
    for thinking, kind in (({"type": "enabled", "budget_tokens": 1024}, "thinking"), ({"type": "disabled"}, "text")):
        answer = await client.messages.create(**asking_for("Two.", thinking=thinking))
        assert [block.type for block in answer.content] == [kind]


async def test_a_stream_is_read_on_from_each_position_on_any_gateway(
    http: httpx.AsyncClient, other_gateway: Address, engine: SyntheticEngine
) -> None:
    request_id, events = await post_events(http, "/v1/messages", asking_for(OUTPUT, tools=[WEATHER]))
    bodies = [event.body for event in events]
    positions = [body.pop("stream_position", "") for body in bodies]
    assert (positions[0], bodies[-1]) == (f"{request_id}/0/", {"type": "message_stop"})
    assert any(not position for position in positions), "some events share the position of the next one"

    def joined(bodies: list[dict[str, Any]]) -> list[Any]:
        """Return events without where deltas are cut."""
        found: list[Any] = []
        for body in bodies:
            *_, text = (body.get("delta") or {"": ""}).values()
            if body["type"] == "content_block_delta" and found and found[-1][0] == body["index"]:
                found[-1][1] += text
            else:
                found.append([body["index"], text] if body["type"] == "content_block_delta" else [body])
        return found

    async with httpx.AsyncClient(base_url=other_gateway.url) as other:
        for number in (0, 5, len(events) // 2, len(events) - 2):
            number = next(place for place in range(number, len(events)) if positions[place])  # noqa: PLW2901
            rest = [event.body for event in await get_events(other, request_id, after=positions[number])]
            for body in rest:
                body.pop("stream_position", None)
            assert joined(rest) == joined(bodies[number + 1 :])
        headers = {"Accept": "application/x-ndjson"}
        lines = (await other.get(f"/v1/requests/{request_id}/events", headers=headers)).text.splitlines()
    *shown, done = [json.loads(line) for line in lines]
    assert done == {"done": True, "stream_position": positions[-1]}
    assert next(body.get("stream_position") for body in shown) == positions[0]
    for body in shown:
        body.pop("stream_position", None)
    assert joined(shown) == joined(bodies)


async def test_idle_streams_have_pings(redis_url: str, engine: SyntheticEngine) -> None:
    engine.hold_at = 2
    async with running_address(gateway_settings(redis_url, keep_alive_s=0.05)) as address:
        async with httpx.AsyncClient(base_url=address.url) as client:
            async with client.stream("POST", "/v1/messages", json=asking_for("abcd", stream=True)) as answer:
                lines = answer.aiter_lines()
                async for line in lines:
                    if line == "event: ping":
                        break
                assert await anext(lines) == 'data: {"type":"ping"}'
                engine.go_on()
                rest = [line async for line in lines if line.startswith("event:")]
    assert rest[-1] == "event: message_stop"


async def test_one_key_is_one_request_that_may_be_accepted_again(
    http: httpx.AsyncClient, redis_url: str, engine: SyntheticEngine
) -> None:
    headers = {"Idempotency-Key": "k", **VERSION}
    asked = asking_for("a", stop_sequences=["b"])
    first, second = [await http.post("/v1/messages", json=asked, headers=headers) for _ in range(2)]
    request_id = first.headers["X-Request-Id"]
    assert first.json() == second.json()
    assert first.json()["id"] == request_id == first.headers["request-id"]
    other = await http.post("/v1/messages", json=asking_for("b"), headers=headers)
    assert (other.status_code, other.json()["error"]["type"]) == (409, "invalid_request_error")
    await lose(redis_url, request_id)
    seed = {"X-Request-Seed": first.headers["X-Request-Seed"]}
    again = await http.put(f"/v1/requests/{request_id}", json=asked, headers={**VERSION, **seed})
    assert again.status_code == 200, again.text
    *_, last = await get_events(http, request_id)
    assert last.body["type"] == "message_stop"


async def test_a_failure_has_anthropics_form(client: anthropic.AsyncAnthropic) -> None:
    """The failing token is a special one of the synthetic tokenizer, which a prompt may spell."""
    import anthropic

    asked: Any = asking_for("") | {"messages": [{"role": "user", "content": f"<unused{FAILING_TOKEN - 2}>"}]}
    with pytest.raises(anthropic.InternalServerError) as caught:
        await client.messages.create(**asked)
    body: Any = caught.value.body
    assert (body["type"], body["error"]["type"], body["request_id"]) == ("error", "api_error", caught.value.request_id)
    assert "told to fail" in body["error"]["message"]
    stream = await client.messages.create(**asked, stream=True)
    with pytest.raises(anthropic.APIStatusError, match="told to fail"):
        [event async for event in stream]
    with pytest.raises(anthropic.NotFoundError):
        await client.messages.create(**{**asked, "model": "none"})


async def test_keys_are_those_of_either_header(engine: SyntheticEngine, redis_url: str, tmp_path: Path) -> None:
    import anthropic

    keys = write_keys(tmp_path / "keys", {"k": "ours"})
    async with running_address(gateway_settings(redis_url, keys=keys)) as address:
        for key in ({"api_key": "k"}, {"auth_token": "k"}):
            async with anthropic.AsyncAnthropic(base_url=address.url, max_retries=0, **key) as client:
                message = await client.messages.create(**asking_for("a"))
                assert engine.claimed[-1].tenant == "ours"
        async with httpx.AsyncClient(base_url=address.url, headers={"x-api-key": "k"}) as http:
            assert (await http.get(f"/v1/requests/{message.id}")).status_code == 200
        async with anthropic.AsyncAnthropic(base_url=address.url, max_retries=0, api_key="wrong") as client:
            for call in (client.messages.create(**asking_for("a")), client.messages.count_tokens(**COUNTED)):
                with pytest.raises(anthropic.AuthenticationError) as caught:
                    await call
                body: Any = caught.value.body
                assert body["error"]["type"] == "authentication_error"


COUNTED: Any = {"model": ECHO_MODEL, "messages": [said("a")]}
IMAGE = {"type": "image", "source": {"type": "url", "url": "http://x"}}
USE = {"type": "tool_use", "id": "a", "name": "b", "input": {}}
TEXT = {"type": "text", "text": "a"}
RESULT = {"type": "tool_result", "tool_use_id": "x"}
SEARCH = {"type": "web_search_20250305", "name": "web_search"}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}]}, "messages"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages.0.content.0.type"),
    ({"messages": [{"role": "user", "content": [USE]}]}, "messages.0.content.0.type"),
    ({"messages": [said("a"), {"role": "assistant", "content": [USE]}]}, "messages.1"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "\ud800"}]}]}, "messages.0.content.0.text"),
    ({"messages": [{"role": "user", "content": "a", "name": "b"}]}, "messages.0.name"),
    ({"messages": [said("a"), {"role": "user", "content": [TEXT, {"type": {}}]}]}, "messages.1.content.1.type"),
    ({"messages": [{"role": "user", "content": [TEXT, {"type": "tool_result"}]}]}, "messages.0.content.1.tool_use_id"),
    (
        {"messages": [{"role": "user", "content": [{**RESULT, "content": [IMAGE]}]}]},
        "messages.0.content.0.content.0.type",
    ),
    ({"messages": [{"role": "user", "content": [{**TEXT, "new": 1}]}]}, "messages.0.content.0.new"),
    ({"system": [IMAGE]}, "system.0.type"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"tools": [SEARCH], "tool_choice": {"type": "tool", "name": "web_search"}}, "tools.0.type"),
    ({"tools": [SEARCH], "tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tools": [{**WEATHER, "defer_loading": True}]}, "tools.0.defer_loading"),
    ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    (
        {"tools": [WEATHER], "tool_choice": {"type": "any"}, "structured_outputs": {"json_object": True}},
        "structured_outputs",
    ),
    ({"tools": [WEATHER], "tool_choice": {"type": "any"}, "thinking": {"type": "enabled"}}, "thinking"),
    ({"output_config": {"effort": "huge"}}, "output_config.effort"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "x"}}}}, "output_config.format"),
    ({"thinking": {"type": "enabled", "display": "x"}}, "thinking.display"),
    ({"mcp_servers": [{}]}, "mcp_servers"),
    ({"speed": "fast"}, "speed"),
    ({"stop": "a"}, "stop"),
    ({"unknown": 1}, "unknown"),
]


async def test_what_is_not_supported_is_refused_by_name(http: httpx.AsyncClient, engine: SyntheticEngine) -> None:
    for more, field in REFUSED:
        content = json.dumps(asking_for("x") | more)
        answer = await http.post("/v1/messages", content=content, headers={"Content-Type": "application/json"})
        body = answer.json()
        assert (answer.status_code, body["error"]["type"]) == (400, "invalid_request_error"), answer.text
        assert body["error"]["message"].startswith(f"{field}: "), answer.text
    for method, path, more, status, kind in (
        ("GET", "/v1/messages", {}, 405, "invalid_request_error"),
        ("POST", "/v1/messages/batches", {}, 404, "not_found_error"),
        ("POST", "/v1/messages", {"json": {"system": "x" * 9_000_000}}, 413, "request_too_large"),
    ):
        answer = await http.request(method, path, **more)
        assert answer.status_code == status, answer.text
        assert (answer.json()["type"], answer.json()["error"]["type"]) == ("error", kind), answer.text
    assert "type" not in (await http.post("/v1/messages2")).json()
    assert not engine.claimed
