"""LiteLLM against a gateway: `litellm_program.py URL`, with the results as JSON on stdout."""

import json
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # its prices come from the net otherwise

import litellm

QUESTION = [{"role": "user", "content": "Who lives in the lighthouse?"}]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Mara", "Otto"]}, "is_keeper": {"type": "boolean"}},
    "required": ["name", "is_keeper"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Oslo", "Bergen"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def main(url: str) -> dict[str, object]:
    """Make the calls; return what they brought."""
    options = {"model": "openai/demo", "api_base": f"{url}/v1", "api_key": "none", "temperature": 0, "max_tokens": 200}
    whole = litellm.completion(messages=QUESTION, **options)
    chunks = list(litellm.completion(messages=QUESTION, stream=True, **options))
    forced = litellm.completion(
        messages=QUESTION,
        tools=[WEATHER],
        tool_choice={"type": "function", "function": {"name": "get_weather"}},
        **options,
    )
    form = {"type": "json_schema", "json_schema": {"name": "villager", "schema": SCHEMA, "strict": True}}
    structured = litellm.completion(messages=QUESTION, response_format=form, **options)
    calls = forced.choices[0].message.tool_calls
    return {
        "text": whole.choices[0].message.content,
        "tokens": whole.usage.completion_tokens,
        "streamed": "".join(chunk.choices[0].delta.content or "" for chunk in chunks),
        "num_chunks": len(chunks),
        "calls": [[call.function.name, sorted(json.loads(call.function.arguments))] for call in calls],
        "structured": sorted(json.loads(structured.choices[0].message.content)),
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
