"""Models, requests, files, batches, and what a gateway says of itself."""

from typing import Any, Literal

from pydantic import BaseModel, Field

from pagestream_gateway.http.schemas.generation import UsageSchema


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
