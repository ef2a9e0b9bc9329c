"""Which fields of the official clients' types a gateway knows: `sdk_fields.py URL`, with the results as JSON on stdout.

Fields of requests are sent, each in a body of its own with a value of no use: a gateway that does not know the field
says so by its name. Fields of answers are compared with those that the clients' types have.
"""

import json
import re
import sys
import typing
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx2
import openai
from anthropic.types import beta as anthropic_beta
from anthropic.types import message_count_tokens_params, message_create_params
from anthropic.types.beta import message_count_tokens_params as beta_count_params
from anthropic.types.beta import message_create_params as beta_params
from anthropic.types.beta import parsed_beta_message
from openai.types import chat, completion_create_params, embedding_create_params, responses, shared_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params as response_params
from openai.types.responses import response_input_param as items
from pydantic import BaseModel

CHAT, TEXT, RESPONSES, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"
MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
USER = {"role": "user", "content": "Hello."}
CALL = {"id": "call_a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
FUNCTION = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
USE = {"type": "tool_use", "id": "call_a", "name": "f", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "call_a"}
ITEM_CALL = {"type": "function_call", "call_id": "call_a", "name": "f", "arguments": "{}"}
FLAT_TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": False}
OUTPUT_TEXT = {"type": "output_text", "text": "a", "annotations": []}
BASES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [USER], "max_tokens": 1},
    TEXT: {"prompt": "a", "max_tokens": 1},
    RESPONSES: {"input": [USER], "max_output_tokens": 1},
    EMBEDDINGS: {"input": "a"},
    MESSAGES: {"messages": [USER], "max_tokens": 1},
    COUNT: {"messages": [USER]},
}
NOT_SENT = {"betas", "user_profile_id", "workspace_id"}
"""Arguments of the clients' methods that become headers; the base bodies' own fields are known."""

REQUESTS: list[tuple[str, Any, str, dict[str, Any]]] = [
    # route, type, place of the object in the body, body
    (CHAT, chat_params.CompletionCreateParamsBase, "", {}),
    (CHAT, chat.ChatCompletionUserMessageParam, "messages.0", {}),
    (CHAT, chat.ChatCompletionSystemMessageParam, "messages.0", {"messages": [{"role": "system", "content": "a"}]}),
    (
        CHAT,
        chat.ChatCompletionDeveloperMessageParam,
        "messages.0",
        {"messages": [{"role": "developer", "content": "a"}]},
    ),
    (
        CHAT,
        chat.ChatCompletionAssistantMessageParam,
        "messages.0",
        {"messages": [{"role": "assistant", "content": "a"}]},
    ),
    (CHAT, chat.ParsedChatCompletionMessage, "messages.0", {"messages": [{"role": "assistant", "content": "a"}]}),
    (
        CHAT,
        chat.ChatCompletionToolMessageParam,
        "messages.0",
        {"messages": [{"role": "tool", "content": "a", "tool_call_id": "call_a"}]},
    ),
    (
        CHAT,
        chat.ChatCompletionContentPartTextParam,
        "messages.0.content.0",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]},
    ),
    (
        CHAT,
        chat.ChatCompletionMessageFunctionToolCallParam,
        "messages.0.tool_calls.0",
        {"messages": [{"role": "assistant", "tool_calls": [CALL]}]},
    ),
    (
        CHAT,
        chat.ParsedFunction,
        "messages.0.tool_calls.0.function",
        {"messages": [{"role": "assistant", "tool_calls": [CALL]}]},
    ),
    (CHAT, chat.ChatCompletionFunctionToolParam, "tools.0", {"tools": [FUNCTION]}),
    (CHAT, shared_params.FunctionDefinition, "tools.0.function", {"tools": [FUNCTION]}),
    (CHAT, chat.ChatCompletionStreamOptionsParam, "stream_options", {"stream": True, "stream_options": {}}),
    (TEXT, completion_create_params.CompletionCreateParamsBase, "", {}),
    (EMBEDDINGS, embedding_create_params.EmbeddingCreateParams, "", {}),
    (RESPONSES, response_params.ResponseCreateParamsBase, "", {}),
    (RESPONSES, responses.EasyInputMessageParam, "input.0", {}),
    (RESPONSES, items.Message, "input.0", {"input": [{"type": "message", **USER}]}),
    (
        RESPONSES,
        responses.ResponseOutputMessageParam,
        "input.0",
        {"input": [{"type": "message", "role": "assistant", "content": [OUTPUT_TEXT]}]},
    ),
    (
        RESPONSES,
        responses.ParsedResponseOutputText,
        "input.0.content.0",
        {"input": [{"type": "message", "role": "assistant", "content": [OUTPUT_TEXT]}]},
    ),
    (
        RESPONSES,
        responses.ResponseInputTextParam,
        "input.0.content.0",
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}]},
    ),
    (RESPONSES, responses.ResponseFunctionToolCallParam, "input.1", {"input": [USER, ITEM_CALL]}),
    (RESPONSES, responses.ParsedResponseFunctionToolCall, "input.1", {"input": [USER, ITEM_CALL]}),
    (RESPONSES, responses.ResponseFunctionToolCallItem, "input.1", {"input": [USER, ITEM_CALL]}),
    (
        RESPONSES,
        items.FunctionCallOutput,
        "input.2",
        {"input": [USER, ITEM_CALL, {"type": "function_call_output", "call_id": "call_a", "output": "a"}]},
    ),
    (
        RESPONSES,
        responses.ResponseReasoningItemParam,
        "input.1",
        {"input": [USER, {"type": "reasoning", "summary": [], "content": []}]},
    ),
    (RESPONSES, items.ItemReference, "input.1", {"input": [USER, {"type": "item_reference", "id": "a"}]}),
    (RESPONSES, responses.FunctionToolParam, "tools.0", {"tools": [FLAT_TOOL]}),
    (RESPONSES, responses.ResponseTextConfigParam, "text", {"text": {}}),
    (RESPONSES, shared_params.Reasoning, "reasoning", {"reasoning": {}}),
    (MESSAGES, message_create_params.MessageCreateParamsBase, "", {}),
    (MESSAGES, beta_params.MessageCreateParamsBase, "", {}),
    (COUNT, message_count_tokens_params.MessageCountTokensParams, "", {}),
    (COUNT, beta_count_params.MessageCountTokensParams, "", {}),
    (
        MESSAGES,
        anthropic.types.Message,
        "messages.1",
        {"messages": [USER, {"role": "assistant", "content": "a"}, USER]},
    ),
    (
        MESSAGES,
        anthropic_beta.BetaMessage,
        "messages.1",
        {"messages": [USER, {"role": "assistant", "content": "a"}, USER]},
    ),
    (
        MESSAGES,
        anthropic.types.TextBlockParam,
        "messages.0.content.0",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]},
    ),
    (
        MESSAGES,
        parsed_beta_message.ParsedBetaTextBlock,
        "messages.1.content.0",
        {"messages": [USER, {"role": "assistant", "content": [{"type": "text", "text": "a"}]}, USER]},
    ),
    (
        MESSAGES,
        anthropic.types.ThinkingBlockParam,
        "messages.1.content.0",
        {"messages": [USER, {"role": "assistant", "content": [{"type": "thinking", "thinking": "a"}]}, USER]},
    ),
    (
        MESSAGES,
        anthropic.types.ToolUseBlockParam,
        "messages.1.content.0",
        {"messages": [USER, {"role": "assistant", "content": [USE]}, {"role": "user", "content": [RESULT]}]},
    ),
    (
        MESSAGES,
        anthropic.types.ToolResultBlockParam,
        "messages.2.content.0",
        {"messages": [USER, {"role": "assistant", "content": [USE]}, {"role": "user", "content": [RESULT]}]},
    ),
    (MESSAGES, anthropic_beta.BetaToolParam, "tools.0", {"tools": [{"name": "f", "input_schema": {"type": "object"}}]}),
    (
        MESSAGES,
        anthropic.types.ToolChoiceAutoParam,
        "tool_choice",
        {"tools": [{"name": "f", "input_schema": {"type": "object"}}], "tool_choice": {"type": "auto"}},
    ),
    (MESSAGES, anthropic_beta.BetaThinkingConfigEnabledParam, "thinking", {"thinking": {"type": "disabled"}}),
    (MESSAGES, anthropic_beta.BetaThinkingConfigAdaptiveParam, "thinking", {"thinking": {"type": "adaptive"}}),
    (MESSAGES, anthropic_beta.BetaOutputConfigParam, "output_config", {"output_config": {}}),
    (MESSAGES, anthropic.types.MetadataParam, "metadata", {"metadata": {}}),
]


def names_of(kind: Any) -> list[str]:
    """Return a type's fields as JSON spells them."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return sorted(field.alias or name for name, field in kind.model_fields.items())
    return sorted(kind.__required_keys__ | kind.__optional_keys__)


def with_probe(body: dict[str, Any], place: str, name: str) -> dict[str, Any] | None:
    """Return a body with one more field; None where it has the field."""
    copy: dict[str, Any] = json.loads(json.dumps(body))
    found: Any = copy
    for step in filter(None, place.split(".")):
        found = found[int(step) if step.isdecimal() else step]
    if name in found or name == "type":
        return None
    found[name] = {"probe": True}
    return copy


def asked(url: str) -> Iterator[tuple[str, str]]:
    """Yield each field of requests, and what the gateway says of it: known, refused or unknown."""
    with httpx2.Client(base_url=url, timeout=60) as client:
        for route, kind, place, more in REQUESTS:
            for name in names_of(kind):
                body = with_probe({"model": "demo", **BASES[route], **more}, place, name)
                if body is None or (not place and name in NOT_SENT):
                    continue
                answer = client.post(route, json=body)
                text = "" if answer.is_success else answer.json()["error"]["message"]
                is_unknown = re.match(rf"(.*\.)?{name}: Extra inputs|Unknown parameter: '(.*\.)?{name}'", text)
                said = "unknown" if is_unknown else "refused" if "is not supported" in text else "known"
                yield f"{route} {kind.__name__}.{name}", said


def answered(url: str) -> Iterator[tuple[str, str]]:
    """Yield the fields of answers' types that the gateway doesn't write: needed or optional."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    messages = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    said: Any = {"model": "demo", "messages": [USER], "max_tokens": 8}
    tool: Any = {**said, "max_tokens": 60, "tools": [FUNCTION], "tool_choice": "required"}
    use: Any = {**said, "tools": [{"name": "f", "input_schema": {"type": "object"}}], "tool_choice": {"type": "any"}}
    found: list[BaseModel] = [
        client.chat.completions.create(**said, logprobs=True),
        client.chat.completions.create(**tool),
        *client.chat.completions.create(**said, stream=True, stream_options={"include_usage": True}),
        *client.chat.completions.create(**tool, stream=True),
        client.completions.create(model="demo", prompt="a", max_tokens=4, logprobs=1),
        client.embeddings.create(model="demo", input="a"),
        client.responses.create(model="demo", input="a", max_output_tokens=8),
        client.responses.create(
            model="demo", input="a", max_output_tokens=60, tools=[FLAT_TOOL], tool_choice="required"
        ),
        *client.responses.create(model="demo", input="a", max_output_tokens=8, stream=True),
        *client.models.list().data,
        messages.messages.create(**said),
        messages.messages.create(**use),
        *messages.messages.create(**said, stream=True),
        messages.beta.messages.create(**said),
        messages.messages.count_tokens(model="demo", messages=[USER]),
    ]
    seen: set[tuple[str, str]] = set()
    for each in found:
        seen.update(missing(each))
    yield from sorted(seen)


def missing(value: object) -> Iterator[tuple[str, str]]:
    """Yield the fields that an answer's objects lack."""
    if isinstance(value, list):
        for each in value:
            yield from missing(each)
    if isinstance(value, BaseModel):
        for name, field in type(value).model_fields.items():
            if name in value.model_fields_set:
                yield from missing(getattr(value, name))
            elif name != "parsed_output":
                is_needed = field.is_required() and type(None) not in typing.get_args(field.annotation)
                yield f"{type(value).__name__}.{field.alias or name}", "needed" if is_needed else "optional"


if __name__ == "__main__":
    print(json.dumps({"requests": dict(asked(sys.argv[1])), "answers": dict(answered(sys.argv[1]))}))
