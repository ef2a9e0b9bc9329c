"""Tool calls and reasoning of chats, over a real Redis with an engine that writes what the test asks for."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio
from pagestream.v1.records_pb2 import ModelCard
from pydantic import BaseModel
from support.clients.gateway_clients import Address, get_events, post_events
from support.engines.synthetic_engine import ECHO_MODEL, SyntheticEngine, synthetic_card

pytestmark = [pytest.mark.served, pytest.mark.asyncio(loop_scope="module")]

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}<tool_call></tool_call>{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for c in m.tool_calls or () %}{{ c.function.name }}({{ c.function.arguments.items() | list }}){% endfor %}"
    "{% endfor %}{% if think %}<think>{% endif %}"
)
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALLS = (
    "<think>\nTwo cities.\n</think>\n\nI look.\n"
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bergen"}}\n</tool_call>'
)


@pytest.fixture(scope="module")
def card() -> ModelCard:
    return synthetic_card(ECHO_MODEL, max_model_len=4096, chat_template=TEMPLATE)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(shared_gateway: Address) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{shared_gateway.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def asking_for(output: str, **more: Any) -> dict[str, Any]:
    return {
        "model": ECHO_MODEL,
        "messages": [{"role": "user", "content": f"[say]{output}[said]"}],
        "max_tokens": 1000,
        "seed": 0,
        **more,
    }


def joined(deltas: list[dict[str, Any]]) -> dict[str, Any]:
    """Join deltas as a client does."""
    message: dict[str, Any] = {}
    for delta in deltas:
        for name in ("content", "reasoning_content"):
            if name in delta:
                message[name] = message.get(name, "") + delta[name]
        for call in delta.get("tool_calls", ()):
            calls = message.setdefault("tool_calls", [])
            if call["index"] == len(calls):
                calls.append({"id": call["id"], "name": call["function"]["name"], "arguments": ""})
            calls[call["index"]]["arguments"] += call["function"]["arguments"]
    return message


async def test_a_whole_answer_has_its_calls(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(**asking_for(CALLS, tools=[WEATHER]))
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I look."
    assert choice.message.model_extra == dict.fromkeys(("reasoning", "reasoning_content"), "Two cities.")
    calls = choice.message.tool_calls or []
    assert [call.type == "function" and (call.function.name, call.function.arguments) for call in calls] == [
        ("get_weather", '{"city": "Oslo"}'),
        ("get_weather", '{"city": "Bergen"}'),
    ]
    assert len({call.id for call in calls}) == 2


async def test_a_stream_has_the_same_calls_from_any_position(http: httpx.AsyncClient) -> None:
    body = asking_for(CALLS, tools=[WEATHER])
    whole = (await http.post("/v1/chat/completions", json=body)).json()["choices"][0]["message"]
    request_id, events = await post_events(http, "/v1/chat/completions", body)
    deltas = [event.body["choices"][0]["delta"] for event in events[:-1]]
    found = joined(deltas)
    assert (found["content"], found["reasoning_content"]) == (whole["content"], whole["reasoning_content"])
    assert [(each["name"], each["arguments"]) for each in found["tool_calls"]] == [
        (each["function"]["name"], each["function"]["arguments"]) for each in whole["tool_calls"]
    ]
    assert [event.body["choices"][0]["finish_reason"] for event in events[:-1]][-1] == "tool_calls"
    for cut in range(1, len(events) - 1, 7):
        position = events[cut - 1].body["stream_position"]
        rest = await get_events(http, request_id, after=position)
        more = [event.body["choices"][0]["delta"] for event in rest[:-1]]
        assert joined([*deltas[:cut], *more]) == found


class Place(BaseModel):
    """What the answer is parsed to."""

    city: str


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # of the client's own types
async def test_what_helpers_return_is_taken_back(client: openai.AsyncOpenAI, engine: SyntheticEngine) -> None:
    """Messages as `parse` and `stream` give them, as objects and as dumps."""
    tool: Any = openai.pydantic_function_tool(Place, name="get_weather")
    parsed = await client.chat.completions.parse(**asking_for(CALLS, tools=[tool]))
    async with client.chat.completions.stream(**asking_for('{"city": "Oslo"}'), response_format=Place) as stream:
        streamed = await stream.get_final_completion()
    first, second = parsed.choices[0].message, streamed.choices[0].message
    assert [call.function.parsed_arguments for call in first.tool_calls or ()] == [
        Place(city="Oslo"),
        Place(city="Bergen"),
    ]
    assert second.parsed == Place(city="Oslo")
    asked = asking_for("a")["messages"]
    for message in (first, second):
        results = [{"role": "tool", "tool_call_id": call.id, "content": "7"} for call in message.tool_calls or ()]
        forms: list[Any] = [message, message.model_dump(warnings=False), message.to_dict(warnings=False)]
        for form in forms:
            await client.chat.completions.create(**asking_for("x") | {"messages": [*asked, form, *results]})
        prompts = [list(spec.prompts[0].ids) for spec in engine.claimed[-len(forms) :]]
        assert prompts == [prompts[0]] * len(forms)


@pytest.mark.parametrize(
    ("choice", "output", "reason"),
    [
        ("required", '[{"name": "get_weather", "parameters": {"city": "Oslo"}}]', "tool_calls"),
        ({"type": "function", "function": {"name": "get_weather"}}, '{"city": "Oslo"}', "stop"),
    ],
)
async def test_forced_calls_have_a_grammar(
    http: httpx.AsyncClient, client: openai.AsyncOpenAI, choice: Any, output: str, reason: str
) -> None:
    answer = await client.chat.completions.create(**asking_for(output, tools=[WEATHER], tool_choice=choice))
    calls = answer.choices[0].message.tool_calls or []
    assert [call.type == "function" and call.function.arguments for call in calls] == ['{"city": "Oslo"}']
    assert answer.choices[0].finish_reason == reason
    wrong = {"type": "function", "function": {"name": "f", "parameters": {"type": "nothing"}}}
    refused = await http.post("/v1/chat/completions", json=asking_for("x", tools=[wrong], tool_choice="required"))
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tools")


@pytest.mark.parametrize(("output", "num_calls"), [('{"a": 1}', 0), (CALLS.partition("I look.\n")[2], 2)])
async def test_an_answer_of_a_form_or_calls(client: openai.AsyncOpenAI, output: str, num_calls: int) -> None:
    """The grammar is tested apart: the echoing engine has none."""
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
    answer = await client.chat.completions.create(**asking_for(output, tools=[WEATHER], response_format=form))
    [choice] = answer.choices
    assert len(choice.message.tool_calls or []) == num_calls
    assert num_calls or choice.message.content == output
    forced = '[{"name": "get_weather", "parameters": {}}]'
    body = asking_for(forced, tools=[WEATHER], response_format=form, tool_choice="required")
    [choice] = (await client.chat.completions.create(**body)).choices
    assert len(choice.message.tool_calls or []) == 1


async def test_one_call_where_parallel_ones_are_not_wanted(client: openai.AsyncOpenAI) -> None:
    body = asking_for(CALLS, tools=[WEATHER], parallel_tool_calls=False)
    answer = await client.chat.completions.create(**body)
    assert len(answer.choices[0].message.tool_calls or []) == 1


async def test_what_is_no_tool_call_is_content(client: openai.AsyncOpenAI) -> None:
    """Without tools, or with "none", nothing is looked for, and the template is told of none."""
    for more in ({}, {"tools": [WEATHER], "tool_choice": "none"}):
        answer = await client.chat.completions.create(**asking_for("<tool_call>x", **more))
        assert answer.choices[0].message.content == "<tool_call>x"
        assert answer.usage is not None
        assert answer.usage.prompt_tokens < 60


async def test_calls_and_their_results_are_given_to_the_template(http: httpx.AsyncClient) -> None:
    call = {
        "id": "c",
        "type": "function",
        "function": {"name": "get_weather", "arguments": '{"city": "[say]ok[said]"}'},
    }
    messages = [
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "so"},
        {"role": "tool", "tool_call_id": "c", "content": "7 degrees"},
    ]
    answer = await http.post("/v1/chat/completions", json=asking_for("x") | {"messages": messages})
    assert answer.json()["choices"][0]["message"]["content"] == "ok", answer.text


async def test_a_prompt_may_open_the_reasoning(http: httpx.AsyncClient) -> None:
    body = asking_for("long thoughts</think>short", chat_template_kwargs={"think": True})
    message = (await http.post("/v1/chat/completions", json=body)).json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("long thoughts", "short")
    kept = (await http.post("/v1/chat/completions", json={**body, "separate_reasoning": False})).json()
    assert kept["choices"][0]["message"]["content"] == "long thoughts</think>short"
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
    forced = asking_for("{}", chat_template_kwargs={"think": True}, response_format=schema)
    answer = (await http.post("/v1/chat/completions", json=forced)).json()
    assert answer["choices"][0]["message"]["content"] == "{}", "a grammar leaves no room for reasoning"


async def test_schemas_of_forced_calls_keep_their_references(http: httpx.AsyncClient) -> None:
    parameters = {
        "type": "object",
        "properties": {
            "kids": {"type": "array", "items": {"$ref": "#"}},
            "a": {"type": "string"},
            "b": {"$ref": "#/properties/a"},
            "c": {"$ref": "#/$defs/text"},
        },
        "$defs": {"text": {"type": "string"}},
    }
    tools = [{"type": "function", "function": {"name": name, "parameters": parameters}} for name in ("f", "g")]
    answer = await http.post("/v1/chat/completions", json=asking_for("[]", tools=tools, tool_choice="required"))
    assert answer.status_code == 200, answer.text
    tools[0]["function"]["parameters"] = {"$defs": [1], "$ref": "#/$defs/x"}
    refused = await http.post("/v1/chat/completions", json=asking_for("[]", tools=tools, tool_choice="required"))
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tools")
