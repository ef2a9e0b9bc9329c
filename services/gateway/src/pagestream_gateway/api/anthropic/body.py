"""The bodies of POST /v1/messages and /v1/messages/count_tokens."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pagestream.v1.inference_pb2 import SamplingParams, StructuredOutputs
from pagestream.v1.records_pb2 import API_FORM_MESSAGES, AnswerForm
from pydantic import Field

from pagestream_gateway.api.anthropic.content import Blocks, chat_messages
from pagestream_gateway.api.openai import generation
from pagestream_gateway.api.openai.chat.tools import (
    Effort,
    Function,
    FunctionName,
    NamedTool,
    Tool,
    ToolName,
    caller_run,
    check_forced,
    tools_of,
)
from pagestream_gateway.api.openai.generation import (
    ParsedRequest,
    named_as,
    queued_arguments,
    without_unsupported,
)
from pagestream_gateway.api.openai.strict_body import (
    SERVED_NAME,
    Body,
    PromptedBody,
    QueuedBody,
    parse_body,
    with_parameters,
    within,
)
from pagestream_gateway.core.drafts import ChatPrompt, Draft, now_s
from pagestream_gateway.core.sampling import parameters
from pagestream_gateway.core.sampling.json_types import Items
from pagestream_gateway.core.sampling.resolution import sampling_from_json
from pagestream_gateway.core.sampling.response_format import JsonSchema, JsonSchemaFormat, constraint_of
from pagestream_gateway.errors import InvalidRequest, UnsupportedThread

UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    **generation.UNSUPPORTED,
    **generation.OF_CHATS_AND_COMPLETIONS,
    "billing_policy": ({"type": "billing_policy", "bill_to": "self"},),
    "compaction": (),
    "container": (),
    "diagnostics": (),
    "fallbacks": ([], "default"),
    "inference_geo": (),
    "mcp_servers": ([],),
    "speed": ("standard",),
    "user_profile_id": (),
    "workspace_id": (),
    "chat_template": (),
    "n": (1,),
}
"""See generation.UNSUPPORTED."""
_UNSUPPORTED_OF_TOOLS: Mapping[str, tuple[Any, ...]] = {
    "allowed_callers": (["direct"],),
    "defer_loading": (False,),
    "input_examples": ([],),
}
_WITHOUT = frozenset(
    {
        "n",
        "max_tokens",
        "stop",
        "best_of",
        "use_beam_search",
        "beam_width",
        "length_penalty",
        "early_stopping",
        "prompt_logprobs",
    }
)
"""Sampling parameters that messages don't have, or under another name."""
_FORMAT = "output_config.format"
_FIELD_NAMES = {"stop": "stop_sequences", "response_format": _FORMAT, "continue_final_message": "messages"}


class CustomTool(Body):
    """A tool that the caller runs."""

    type: Literal["custom"] | None = None
    name: ToolName
    description: str | None = None
    input_schema: dict[str, Any] = Field(description="A JSON schema of the arguments.")
    strict: bool | None = None
    cache_control: Any = None
    eager_input_streaming: Any = None

    def for_chat(self) -> Tool:
        """Return it as chats have it."""
        function = Function(
            name=self.name, description=self.description, parameters=self.input_schema, strict=self.strict
        )
        return Tool(type="function", function=function)


class ToolChoice(Body):
    """Which tools are called; a grammar forces `any` and `tool`."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = Field(None, description="With `tool`: which one.")
    disable_parallel_tool_use: bool | None = Field(None, description="At most one call.")


class Thinking(Body):
    """Whether the model reasons before it answers, where its template can switch that."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, ge=1, description="A target: it is not held to.")
    display: Literal["summarized", "omitted"] | None = Field(None, description="summarized: it is shown in full.")
    block_binding: Any = Field(None, description="Ignored: nothing is signed here.")


class OutputFormat(Body):
    """JSON that validates against a schema."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    """What the output must be."""

    task_budget: None = Field(None, description="Not supported.")

    effort: Effort | None = Field(None, description="How much reasoning, as far as the model's template knows it.")
    format: OutputFormat | None = None


class PromptBody(PromptedBody):
    """What a prompt is made of."""

    messages: Items[dict[str, Any]] = Field(
        description="Text or blocks of user, assistant or system; the answer goes on with one of the assistant."
    )
    system: Blocks | None = Field(None, description="A system message before all: text, or blocks of text.")
    tools: Items[dict[str, Any]] | None = Field(None, description="Tools that the caller runs; others are left out.")
    tool_choice: ToolChoice | None = Field(None, description="auto, none, or any and tool, which a grammar forces.")
    thinking: Thinking | None = Field(None, description="Left out: as the model's template has it.")
    output_config: OutputConfig | None = Field(None, description="format: json_schema; effort, where it is known.")
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Further values for the model's chat template."
    )
    # Known fields that can't change the output.
    cache_control: Any = None
    context_management: Any = None
    """Edits that a server may make of a conversation that grows too long; none are made."""
    fallback_credit_token: Any = None
    anthropic_version: Any = None
    """With `anthropic_beta` headers of Anthropic's own API, which Bedrock and Vertex have in the body."""
    anthropic_beta: Any = None

    def constraint(self) -> StructuredOutputs | None:
        """Return what the output must match. Raises InvalidRequest."""
        form = self.output_config.format if self.output_config is not None else None
        if form is None:
            return None
        schema = JsonSchema.model_validate({"name": "output", "schema": form.schema_})
        return constraint_of(JsonSchemaFormat(type="json_schema", json_schema=schema))

    def prompt(self, *, add_special_tokens: bool) -> ChatPrompt:
        """Return the conversation. Raises InvalidRequest."""
        choice, is_reasoning_asked = self.tool_choice, None
        is_parallel = choice is None or not choice.disable_parallel_tool_use
        tools = tools_of(_chat_tools(self.tools or (), choice), _chat_choice(choice), is_parallel)
        if self.thinking is not None and self.thinking.type != "adaptive":
            is_reasoning_asked = self.thinking.type == "enabled"
        if is_reasoning_asked and tools.is_forced:
            raise InvalidRequest("thinking", "excludes a forced tool call, as in Anthropic's API")
        messages = chat_messages(self.messages, self.system)
        return ChatPrompt(
            messages=messages,
            continue_final_message=messages[-1]["role"] == "assistant",
            arguments=self.chat_template_kwargs or {},
            add_special_tokens=add_special_tokens,
            tools=tools,
            reasons=is_reasoning_asked,
            shows_reasoning=self.thinking is None or self.thinking.display != "omitted",
            effort=self.output_config.effort if self.output_config is not None else None,
        )


@with_parameters(without=_WITHOUT)
class MessageBody(PromptBody, QueuedBody):
    """POST /v1/messages."""

    max_tokens: int = Field(description="Most tokens of the answer, reasoning included.")
    stop_sequences: Items[str] | None = Field(None, description="The answer ends before any of these.")
    stream: bool | None = Field(
        None, description="Answer as a stream: server-sent events, or NDJSON where Accept says so."
    )
    service_tier: Literal["auto", "standard_only"] | None = Field(  # type: ignore[assignment]
        None, description='There is one tier: answers say "standard".'
    )


class CountBody(PromptBody):
    """POST /v1/messages/count_tokens."""

    model: str | None = Field(None, description=SERVED_NAME)
    add_special_tokens: bool | None = None


def parse(document: dict[str, Any], headers: Mapping[str, str]) -> ParsedRequest:
    """Read a body and its headers. Raises InvalidRequest."""
    body = parse_body(MessageBody, _without_unsupported(document))
    field_names = dict(_FIELD_NAMES)
    with named_as(field_names):
        prompt = body.prompt(add_special_tokens=bool(body.add_special_tokens))
        given = {each.name: getattr(body, each.name, None) for each in parameters.PARAMETERS if each.json_type}
        sampling = sampling_from_json({**given, "max_tokens": body.max_tokens, "stop": body.stop_sequences})
        if (constraint := body.constraint()) is not None:
            if sampling.HasField("structured_outputs"):
                raise InvalidRequest("response_format", "excludes structured_outputs")
            sampling.structured_outputs.CopyFrom(constraint)
            field_names["structured_outputs"] = _FORMAT
        check_forced(prompt.tools, sampling.stop, given=given["structured_outputs"])
        if (forced := prompt.tools.constraint()) is not None:
            sampling.structured_outputs.CopyFrom(forced)
            field_names["structured_outputs"] = "tools"
        queued = queued_arguments(body, headers, document, API_FORM_MESSAGES)
    constraint_field = field_names.get("structured_outputs", "")
    answer = AnswerForm(api=API_FORM_MESSAGES, created=now_s(), constraint_field=constraint_field)
    draft = Draft(prompts=[prompt], prompt_field="messages", sampling=sampling, answer=answer, **queued)
    return ParsedRequest(draft, stream=bool(body.stream), field_names=field_names)


def parse_count(document: dict[str, Any], _: Mapping[str, str]) -> Draft:
    """Return what would be generated from. Raises InvalidRequest."""
    body = parse_body(CountBody, _without_unsupported(document))
    return Draft(
        model=body.model or "",
        prompts=[body.prompt(add_special_tokens=bool(body.add_special_tokens))],
        prompt_field="messages",
        sampling=SamplingParams(),
        answer=AnswerForm(),
    )


def _without_unsupported(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return a body without what asks for nothing. Raises UnsupportedField, for threads as clients know it."""
    if document.get("thread") is not None:
        raise UnsupportedThread("thread", "send the whole conversation")
    return without_unsupported({name: value for name, value in document.items() if name != "thread"}, UNSUPPORTED)


def _chat_tools(tools: Sequence[dict[str, Any]], choice: ToolChoice | None) -> list[Tool]:
    found = []
    named = [choice.name] if choice is not None and choice.name is not None else []
    for number, tool in caller_run(
        [{**tool, "type": tool.get("type") or "custom"} for tool in tools], ("custom",), named
    ):
        with within(f"tools.{number}"):
            found.append(parse_body(CustomTool, without_unsupported(tool, _UNSUPPORTED_OF_TOOLS)).for_chat())
    return found


def _chat_choice(choice: ToolChoice | None) -> Literal["none", "auto", "required"] | NamedTool:
    if choice is None:
        return "auto"
    if (choice.type == "tool") != (choice.name is not None):
        raise InvalidRequest("tool_choice.name", 'is needed with the type "tool", and with it alone')
    match choice.type:
        case "tool":
            return NamedTool(type="function", function=FunctionName(name=choice.name or ""))
        case "any":
            return "required"
        case other:
            return other
