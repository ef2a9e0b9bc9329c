"""Completions, chats, responses and messages, whole and as events."""

from typing import Any, Literal

from pydantic import BaseModel, Field

from pagestream_gateway.http.schemas.errors import MessageErrorDetail


class QueueLine(BaseModel):
    """A line of NDJSON before the first token, with X-Queue-Comments: where the request stands."""

    queue_position: int
    expected_wait_ms: int | None


class DoneLine(BaseModel):
    """The last line of NDJSON. A stream that ends without it is read on from its last stream_position."""

    done: Literal[True]
    stream_position: str


class UsageSchema(BaseModel):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]


class _Answer(BaseModel):
    id: str
    created: int
    model: str
    system_fingerprint: str | None = Field(description="Numerics fingerprint of the engine: equal ones compute alike.")
    service_tier: Literal["default"]


class _Choice(BaseModel):
    index: int
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length", "tool_calls", "cancelled", "deadline", "error"] | None
    stop_reason: str | int | None = Field(None, description="The stop string or stop token that ended the choice.")


class CompletionChoice(_Choice):
    """A choice of a completion; of a stream, a part of it."""

    text: str


class CalledFunctionSchema(BaseModel):
    """A function that is called."""

    name: str | None = Field(None, description="In the first delta of a call.")
    arguments: str = Field(description="JSON text; of a delta, a piece of it.")


class ToolCallSchema(BaseModel):
    """A call of a tool, or a piece of one."""

    index: int | None = Field(None, description="Of the call, in deltas.")
    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledFunctionSchema


class ChatMessage(BaseModel):
    """The assistant's message."""

    role: Literal["assistant"]
    content: str | None = Field(description="null where there are tool calls alone.")
    refusal: None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallSchema] | None = None


class ChatChoice(_Choice):
    """A choice of a chat completion."""

    message: ChatMessage


class ChatDelta(BaseModel):
    """A part of the assistant's message."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallSchema] | None = None


class ChatChunkChoice(_Choice):
    """A part of a choice of a chat completion."""

    delta: ChatDelta


class _Chunk(_Answer):
    stream_position: str = Field(
        description="`<request id>/<next index>/<digest>`: the Last-Event-ID with which a reader goes on after this."
    )
    usage: UsageSchema | None = None


class CompletionAnswer(_Answer):
    """A completion."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: UsageSchema


class CompletionChunk(_Chunk):
    """The data of an event of a streamed completion."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class ChatAnswer(_Answer):
    """A chat completion."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: UsageSchema


class ChatChunk(_Chunk):
    """The data of an event of a streamed chat completion."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]


class ResponseUsage(BaseModel):
    """Tokens of a response."""

    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class ResponseAnswer(BaseModel):
    """A response."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None = Field(description="When it was completed, in Unix seconds; null otherwise.")
    status: Literal["queued", "in_progress", "completed", "incomplete", "cancelled", "failed"]
    background: bool
    error: dict[str, str] | None
    incomplete_details: dict[str, str] | None
    model: str
    output: list[dict[str, Any]] = Field(description="Items: message, function_call, reasoning; none before the end.")
    usage: ResponseUsage | None
    service_tier: Literal["default"]
    store: bool
    temperature: float
    top_p: float
    presence_penalty: float
    frequency_penalty: float
    truncation: Literal["auto", "disabled"]
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: Any = None
    metadata: dict[str, str]
    user: Any = None
    prompt_cache_key: Any = None
    safety_identifier: Any = None
    previous_response_id: str | None
    parallel_tool_calls: bool
    reasoning: dict[str, Any]
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_logprobs: int


class ResponseEvent(BaseModel):
    """The data of an event of a response; members beside the first two are those of its type."""

    type: str
    sequence_number: int = Field(description="The starting_after with which a reader goes on after this.")
    stream_position: str | None = Field(
        None, description="The Last-Event-ID that proves what was read; not each event has one."
    )
    response: ResponseAnswer | None = None
    output_index: int | None = None
    content_index: int | None = None
    item_id: str | None = None
    item: dict[str, Any] | None = None
    part: dict[str, Any] | None = None
    delta: str | None = None
    text: str | None = None
    name: str | None = None
    arguments: str | None = None
    logprobs: list[Any] | None = None
    code: str | None = None
    message: str | None = None
    param: str | None = None


class ResponseDeletion(BaseModel):
    """A response that is gone."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class ResponseInput(BaseModel):
    """A page of the items of a response's conversation before its output."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class MessageUsage(BaseModel):
    """Tokens of a message; those of the prompt are the sum of the first three."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: dict[str, int] = Field(description="thinking_tokens: reasoning, with its markers.")
    server_tool_use: None
    cache_creation: dict[str, int] | None = None
    inference_geo: None = None
    service_tier: Literal["standard"] | None = None


class MessageAnswer(BaseModel):
    """A message."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]] = Field(description="Blocks: text, thinking, tool_use.")
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "cancelled", "deadline"] | None
    stop_sequence: str | None
    stop_details: None
    container: None
    usage: MessageUsage


class MessageEvent(BaseModel):
    """The data of an event of a message; members beside the first two are those of its type."""

    type: str
    stream_position: str | None = Field(
        None, description="The Last-Event-ID with which a reader goes on after this; not each event has one."
    )
    message: MessageAnswer | None = None
    index: int | None = None
    content_block: dict[str, Any] | None = None
    delta: dict[str, Any] | None = None
    usage: MessageUsage | None = None
    error: MessageErrorDetail | None = None
    request_id: str | None = None


class MessageTokens(BaseModel):
    """The tokens of a message's prompt."""

    input_tokens: int
