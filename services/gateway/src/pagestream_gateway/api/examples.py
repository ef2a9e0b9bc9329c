"""Bodies to begin with, for the OpenAPI document and the page that shows it.

The document is read without a key, and tells no name of a model: a body may leave that out. Where one is needed it is
MODEL, in whose place the page puts a real one where no key is asked for.
"""

from collections.abc import Mapping
from typing import Any

MODEL = "my-model"
_MESSAGES = [{"role": "user", "content": "Who lives in the lighthouse?"}]
_TOOL_NAME = "get_weather"
_TOOL_ABOUT = "The weather of a place."
_TOOL_SCHEMA = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}
_FORM_NAME = "inhabitant"
_FORM_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "at_home": {"type": "boolean"}},
    "required": ["name", "at_home"],
    "additionalProperties": False,
}
_LABELLED = {"input": ["The harbour is lovely."]}
_SCORED = {"text_1": "Where does the baker work?", "text_2": ["In the bakery.", "At sea."]}
_RANKED = {"query": "Where does the baker work?", "documents": ["In the bakery.", "At sea."], "top_n": 1}
_CHAT = {"messages": _MESSAGES, "max_tokens": 64}
_RESPONSE_BODY = {"model": MODEL, "input": "Who lives in the lighthouse?", "max_output_tokens": 64}

Examples = Mapping[str, dict[str, Any]]
"""Bodies by what they show."""

_BODIES: Mapping[str, Examples] = {
    "/v1/chat/completions": {
        "A question": _CHAT,
        "A stream": {**_CHAT, "stream": True, "stream_options": {"include_usage": True}},
        "An answer by a JSON schema": {
            **_CHAT,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": _FORM_NAME, "strict": True, "schema": _FORM_SCHEMA},
            },
        },
        "A tool": {
            **_CHAT,
            "tools": [
                {
                    "type": "function",
                    "function": {"name": _TOOL_NAME, "description": _TOOL_ABOUT, "parameters": _TOOL_SCHEMA},
                }
            ],
            "tool_choice": "auto",
        },
    },
    "/v1/completions": {
        "A beginning": {"prompt": "Once upon a time", "max_tokens": 64},
        "A stream with log probabilities": {
            "prompt": "Once upon a time",
            "max_tokens": 16,
            "logprobs": 2,
            "stream": True,
        },
    },
    "/v1/responses": {
        "A question": _RESPONSE_BODY,
        "A stream": {**_RESPONSE_BODY, "stream": True},
        "An answer by a JSON schema": {
            **_RESPONSE_BODY,
            "text": {"format": {"type": "json_schema", "name": _FORM_NAME, "schema": _FORM_SCHEMA, "strict": True}},
        },
    },
    "/v1/messages": {
        "A question": _CHAT,
        "A stream": {**_CHAT, "stream": True},
        "A tool": {
            **_CHAT,
            "tools": [{"name": _TOOL_NAME, "description": _TOOL_ABOUT, "input_schema": _TOOL_SCHEMA}],
        },
    },
    "/v1/messages/count_tokens": {"A question": {"messages": _MESSAGES}},
    "/v1/embeddings": {"Two texts": {"input": ["The lighthouse", "The bakery"]}},
    **{key: {"A text": _LABELLED} for key in ("/v1/classify", "/classify")},
    **{key: {"A text and two others": _SCORED} for key in ("/v1/score", "/score")},
    **{key: {"The best of two": _RANKED} for key in ("/v1/rerank", "/v2/rerank", "/rerank")},
    "/v1/batches": {
        "Two jobs": {
            "endpoint": "/v1/chat/completions",
            "requests": [{"custom_id": each, "body": _CHAT} for each in ("first", "second")],
        },
        "The jobs of a file": {"endpoint": "/v1/chat/completions", "input_file_id": "file-0123456789abcdef"},
    },
    "/tokenize": {"A text": {"prompt": "Once upon a time"}, "A conversation": {"messages": _MESSAGES}},
    "/detokenize": {"Three tokens": {"tokens": [1, 2, 3]}},
    "/v1/requests/{request_id}": {"The chat that it was": {**_CHAT, "seed": 0}},
    "/v1/load_lora_adapter": {"A folder": {"lora_name": "my-adapter", "lora_path": "/adapters/my-adapter"}},
    "/v1/unload_lora_adapter": {"By name": {"lora_name": "my-adapter"}},
    **{key: {"By name": {"model": MODEL}} for key in ("/v1/models/load", "/v1/models/unload")},
}
"""By path, for the operation there that has a JSON body."""


def examples_of(path: str) -> dict[str, Any]:
    """Return the examples of the body of `path` in OpenAPI's form."""
    return {summary: {"summary": summary, "value": body} for summary, body in _BODIES[path].items()}
