"""Schemas of the answers, for the OpenAPI document alone: answers are written as JSON without them."""

from typing import Any, Literal

from pydantic import BaseModel, Field


class ErrorDetail(BaseModel):
    """What is wrong."""

    message: str
    type: str
    param: str | None = Field(description="The part of the request that is wrong.")
    code: str | None = Field(description="A stable word for the error.")


class ErrorAnswer(BaseModel):
    """OpenAI's form of an error."""

    error: ErrorDetail


class ErrorEvent(ErrorAnswer):
    """The data of the event with which a stream ends that could not go on here."""

    stream_position: str = Field(description="The Last-Event-ID with which a reader goes on, on any gateway.")


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
    truncation: Literal["disabled"]
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


class MessageErrorDetail(BaseModel):
    """What is wrong."""

    type: str
    message: str


class MessageError(BaseModel):
    """Anthropic's form of an error."""

    type: Literal["error"]
    error: MessageErrorDetail
    request_id: str | None = Field(description="null before the request is accepted.")


class MessageUsage(BaseModel):
    """Tokens of a message; those of the prompt are the sum of the first three."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
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


class VectorUsage(BaseModel):
    """Tokens of a request for vectors."""

    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]


class Embedding(BaseModel):
    """The vector of an input."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str = Field(description="Numbers, or in base64 float32 in little-endian order.")


class EmbeddingEvent(Embedding):
    """The data of an event of an embedding request that is read on: one vector."""

    stream_position: str


class EmbeddingAnswer(BaseModel):
    """The vectors of a request; as the last event of a stream without them."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Embedding]
    usage: VectorUsage


class Classification(BaseModel):
    """The labels of a text."""

    index: int
    label: str
    """The likeliest."""
    probs: list[float]
    """Of each label, in the order of the model's files."""
    num_classes: int


class ClassificationAnswer(BaseModel):
    """The labels of a request's texts; as the last event of a stream without them."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Classification]
    usage: VectorUsage


class Score(BaseModel):
    """How alike a text is to its query: a cosine."""

    index: int
    object: Literal["score"]
    score: float


class ScoreAnswer(BaseModel):
    """The scores of a request."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Score]
    usage: VectorUsage


class RerankResult(BaseModel):
    """A document with its score."""

    index: int
    document: dict[str, str] | None = None
    relevance_score: float


class RerankAnswer(BaseModel):
    """The documents of a request, best first."""

    id: str
    model: str
    usage: VectorUsage
    results: list[RerankResult]


class TokenizeAnswer(BaseModel):
    """The tokens of a text or a conversation."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = Field(description="Each token as the vocabulary spells it, where asked for.")


class DetokenizeAnswer(BaseModel):
    """The text of tokens."""

    prompt: str


class ModelAnswer(BaseModel):
    """A model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int
    engines: int = Field(description="Engines that live now.")
    deterministic: bool = Field(
        description="Whether the last engine to publish it computes each sequence alike in any batch, bit for bit."
    )


class ModelList(BaseModel):
    """The models by name."""

    object: Literal["list"]
    data: list[ModelAnswer]


class RequestItem(BaseModel):
    """A request in the list of its tenant's."""

    id: str
    model: str
    created: int = Field(description="Unix seconds of its acceptance, by Redis' clock.")
    state: Literal["queued", "running", "finished"]
    finish_reason: str | None
    next_index: int
    usage: UsageSchema
    attempts: int


class RequestList(BaseModel):
    """A page of a tenant's requests, newest first."""

    object: Literal["list"]
    data: list[RequestItem]
    has_more: bool


class RequestAnswer(BaseModel):
    """Where a request stands."""

    id: str
    model: str
    state: Literal["queued", "running", "finished"]
    queue_position: int | None = Field(description="Requests before it; null unless queued.")
    expected_wait_ms: int | None = Field(
        description="Until an engine takes it, by the measured rate; null for unknown."
    )
    finish_reason: str | None
    next_index: int
    usage: UsageSchema
    attempts: int
    client_request_id: str | None = Field(description="The caller's own id.")


class FileAnswer(BaseModel):
    """A file."""

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"]


class FileList(BaseModel):
    """A page of a tenant's files."""

    object: Literal["list"]
    data: list[FileAnswer]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileDeleted(BaseModel):
    """The end of a file."""

    id: str
    object: Literal["file"]
    deleted: Literal[True]


class BatchCounts(BaseModel):
    """Jobs of a batch."""

    total: int = Field(description="0 before they are counted.")
    completed: int
    failed: int


class BatchUsage(BaseModel):
    """Tokens of a batch's jobs."""

    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class BatchAnswer(BaseModel):
    """A batch."""

    id: str
    object: Literal["batch"]
    endpoint: str
    errors: dict[str, Any] | None = Field(description="Why it has failed, by lines.")
    input_file_id: str
    completion_window: str
    status: Literal[
        "validating", "in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled"
    ]
    output_file_id: str | None = Field(description="The results; null before the end, and where there is none.")
    error_file_id: str | None = Field(description="The jobs that have an error in place of a result; likewise.")
    created_at: int
    expires_at: int = Field(description="The end of its completion window.")
    in_progress_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: BatchCounts
    metadata: dict[str, str] | None
    usage: BatchUsage
    waits_for: str | None = Field(description="The error's code that keeps further jobs waiting now.")


class BatchList(BaseModel):
    """A page of a tenant's batches, newest first."""

    object: Literal["list"]
    data: list[BatchAnswer]
    first_id: str | None
    last_id: str | None
    has_more: bool


class VersionAnswer(BaseModel):
    """The version of the gateway."""

    version: str


class ModelChangeAnswer(BaseModel):
    """That engines were asked for a change; they make it meanwhile."""

    success: bool


class SleepAnswer(BaseModel):
    """Whether engines sleep."""

    is_sleeping: bool = Field(description="Whether no engine that may sleep serves a model.")


class LoadAnswer(BaseModel):
    """What this process is doing."""

    server_load: int = Field(description="Answers that it is writing.")
