"""LiteLLM against a gateway: `litellm_program.py URL`, with the results as JSON on stdout."""

import json
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # its prices come from the net otherwise

import litellm

QUESTION = [{"role": "user", "content": "Who lives in the lighthouse?"}]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "job": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "job", "age"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}
ASKED = [{"role": "user", "content": "What is the weather in Paris, and what is 17 + 25?"}]
RESULTS = {"get_weather": "rain, 12 degrees", "add": "42"}


def main(url: str) -> dict[str, object]:
    """Make the calls; return what they brought."""
    options = {"model": "openai/demo", "api_base": f"{url}/v1", "api_key": "none", "temperature": 0, "max_tokens": 200}
    whole = litellm.completion(messages=QUESTION, **options)
    chunks = list(litellm.completion(messages=QUESTION, stream=True, **options))
    forced = litellm.completion(
        messages=ASKED,
        tools=[WEATHER],
        tool_choice={"type": "function", "function": {"name": "get_weather"}},
        **options,
    )
    form = {"type": "json_schema", "json_schema": {"name": "villager", "schema": SCHEMA, "strict": True}}
    who = [{"role": "user", "content": "Who is Mara?"}]
    structured = litellm.completion(messages=who, response_format=form, **options)
    chosen = litellm.completion(messages=ASKED, tools=[WEATHER, ADD], **options).choices[0].message
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": RESULTS[call.function.name]} for call in chosen.tool_calls
    ]
    answer = litellm.completion(messages=[*ASKED, chosen.model_dump(), *results], tools=[WEATHER, ADD], **options)
    return {
        "text": whole.choices[0].message.content,
        "tokens": whole.usage.completion_tokens,
        "streamed": "".join(chunk.choices[0].delta.content or "" for chunk in chunks),
        "num_chunks": len(chunks),
        "forced": called(forced.choices[0].message),
        "calls": called(chosen),
        "answer": answer.choices[0].message.content,
        "structured": json.loads(structured.choices[0].message.content),
    }


def called(message: litellm.Message) -> list[list[object]]:
    """Return names and arguments of a message's calls."""
    return [[call.function.name, json.loads(call.function.arguments)] for call in message.tool_calls]


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
