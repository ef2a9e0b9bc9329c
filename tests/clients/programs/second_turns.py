"""Second turns of OpenAI's and Anthropic's clients for Python: `second_turns.py URL`, with the results as JSON.

What a helper returned goes back as an object and as each dump of it, whole responses' members among them.
"""

import json
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
from openai.types.responses.response_create_params import ResponseCreateParamsBase
from pydantic import BaseModel

warnings.simplefilter("ignore")  # of the clients' own types, when they dump what they parsed
ASKED: Any = [{"role": "user", "content": "What is the weather in Paris, and what is 17 + 25?"}]
WHO: Any = [{"role": "user", "content": "Who is Mara?"}]
NEXT: Any = {"role": "user", "content": "Who lives in the lighthouse?"}
RESULTS = {"get_weather": "rain, 12 degrees", "add": "42"}
COMMON: Any = {"model": "demo", "temperature": 0}


class Villager(BaseModel):
    """Somebody of the village."""

    name: str
    job: str
    age: int


class City(BaseModel):
    """Arguments of get_weather."""

    city: str


class Sum(BaseModel):
    """Arguments of add."""

    a: int
    b: int


ARGUMENTS: dict[str, type[BaseModel]] = {"get_weather": City, "add": Sum}
CHAT_TOOLS: Any = [openai.pydantic_function_tool(kind, name=name) for name, kind in ARGUMENTS.items()]
FLAT_TOOLS: Any = [{"type": "function", **tool["function"]} for tool in CHAT_TOOLS]
USE_TOOLS: Any = [{"name": name, "input_schema": kind.model_json_schema()} for name, kind in ARGUMENTS.items()]


def forms(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield an object of a client, and its dumps."""
    yield "object", value
    for way in ({}, {"exclude_unset": True}, {"exclude_none": True}, {"by_alias": True}, {"mode": "json"}):
        yield f"model_dump({', '.join(way)})", value.model_dump(**way)
    yield "to_dict()", value.to_dict()


def chats(client: openai.OpenAI) -> Iterator[tuple[str, str | None]]:
    """Yield second turns of chats."""
    api = client.chat.completions
    tools: Any = {**COMMON, "messages": ASKED, "tools": CHAT_TOOLS}
    firsts = {
        "create": (ASKED, api.create(**tools)),
        "parse": (ASKED, api.parse(**tools)),
        "parse of a form": (WHO, api.parse(**COMMON, messages=WHO, response_format=Villager)),
    }
    with api.stream(**COMMON, messages=WHO, response_format=Villager) as stream:
        firsts["stream of a form"] = WHO, stream.get_final_completion()
    with api.stream(**tools) as stream:
        firsts["stream"] = ASKED, stream.get_final_completion()
    for name, (asked, first) in firsts.items():
        message = first.choices[0].message
        results: Any = [
            {"role": "tool", "tool_call_id": call.id, "content": RESULTS[call.function.name]}
            for call in message.tool_calls or ()
        ]
        more: Any = {"tools": CHAT_TOOLS} if results else {}
        for form, said in forms(message):
            second = api.create(**COMMON, **more, messages=[*asked, said, *(results or [NEXT])])
            yield f"chat, {name}, {form}", second.choices[0].message.content


def responses(client: openai.OpenAI) -> Iterator[tuple[str, str | None]]:
    """Yield second turns of responses."""
    api = client.responses
    tools: Any = {**COMMON, "input": ASKED, "tools": FLAT_TOOLS}
    firsts: dict[str, tuple[Any, Any]] = {
        "create": (ASKED, api.create(**tools)),
        "parse": (ASKED, api.parse(**tools)),
        "parse of a form": (WHO, api.parse(**COMMON, input=WHO, text_format=Villager)),
    }
    with api.stream(**tools) as stream:
        firsts["stream"] = ASKED, stream.get_final_response()
    with api.stream(**COMMON, input=WHO, text_format=Villager) as stream:
        firsts["stream of a form"] = WHO, stream.get_final_response()
    for name, (asked, first) in firsts.items():
        results = [
            {"type": "function_call_output", "call_id": item.call_id, "output": RESULTS[item.name]}
            for item in first.output
            if item.type == "function_call"
        ]
        listed = list(api.input_items.list(first.id, order="asc"))
        references = [{"type": "item_reference", "id": item.id} for item in [*listed, *first.output]]
        rest = results or [NEXT]
        more: Any = {"tools": FLAT_TOOLS} if results else {}
        inputs = {"references": [*references, *rest], "listed items": [*listed, *first.output, *rest]}
        for form, said in forms(first):
            output = said["output"] if isinstance(said, dict) else said.output
            inputs[form] = [*asked, *output, *rest]
        for form, given in inputs.items():
            yield f"responses, {name}, {form}", api.create(**COMMON, **more, input=given).output_text
        repeated = ResponseCreateParamsBase.__optional_keys__ & type(first).model_fields.keys()
        for form, said in forms(first):
            body = {each: getattr(first, each) if said is first else said.get(each) for each in repeated}
            text = body.pop("text")
            body = {each: value for each, value in body.items() if value is not None} | COMMON
            yield f"responses, {name}, members of {form}", api.create(**body, input=[NEXT]).output_text
            if api.create(**COMMON, input=WHO, text=text).text != first.text:
                raise ValueError(f"{form}: the format of the text is another one")


def messages(client: anthropic.Anthropic) -> Iterator[tuple[str, str | None]]:
    """Yield second turns of messages."""
    limited: Any = {"model": "demo", "max_tokens": 200, "extra_body": {"temperature": 0}}
    tools: Any = {**limited, "messages": ASKED, "tools": USE_TOOLS}
    for kind, api in (("messages", client.messages), ("beta.messages", client.beta.messages)):
        firsts: dict[str, tuple[Any, Any]] = {
            "create": (ASKED, api.create(**tools)),
            "parse": (WHO, api.parse(**limited, messages=WHO, output_format=Villager)),
        }
        with api.stream(**tools) as stream:
            firsts["stream"] = ASKED, stream.get_final_message()
        with api.stream(**limited, messages=WHO, output_format=Villager) as stream:
            firsts["stream of a form"] = WHO, stream.get_final_message()
        for name, (asked, first) in firsts.items():
            results = [
                {"type": "tool_result", "tool_use_id": block.id, "content": RESULTS[block.name]}
                for block in first.content
                if block.type == "tool_use"
            ]
            last = {"role": "user", "content": results} if results else NEXT
            more: Any = {"tools": USE_TOOLS} if results else {}
            for form, said in forms(first):
                content = said["content"] if isinstance(said, dict) else said.content
                for what, turn in (("content", {"role": "assistant", "content": content}), ("message", said)):
                    second = api.create(**limited, **more, messages=[*asked, turn, last])
                    yield f"{kind}, {name}, {what} as {form}", second.content[0].text

    @anthropic.beta_tool
    def get_weather(city: str) -> str:
        """Weather of a city."""
        return RESULTS["get_weather"]

    @anthropic.beta_tool
    def add(a: int, b: int) -> str:
        """Add two numbers."""
        return RESULTS["add"]

    runner = client.beta.messages.tool_runner(**limited, messages=ASKED, tools=[get_weather, add])
    done = runner.until_done()
    second = client.messages.create(**limited, messages=[*ASKED, {"role": "assistant", "content": done.content}, NEXT])
    yield "beta.messages, tool_runner", second.content[0].text


def main(url: str) -> dict[str, str | None]:
    """Make the calls; return what the second ones brought."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        found = dict(chats(client)) | dict(responses(client))
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as of_messages:
        return found | dict(messages(of_messages))


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
