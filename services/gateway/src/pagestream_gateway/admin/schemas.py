"""The answers of /admin/v1, as the OpenAPI document shows them."""

from typing import Literal

from pydantic import BaseModel, Field

from pagestream_gateway.http.schemas.resources import RequestAnswer


class AdminEngine(BaseModel):
    """An engine's load at its last heartbeat; null where it has not said it yet."""

    id: str
    model: str
    running: int | None = Field(description="Sequences that hold KV blocks.")
    waiting: int | None = Field(description="Sequences that wait inside the engine.")
    kv_utilization: float | None = Field(description="Referenced blocks by all blocks.")
    max_model_len: int | None = Field(description="Longest context in tokens; 0 for any.")


class AdminEngines(BaseModel):
    """The living engines by model."""

    object: Literal["list"]
    data: list[AdminEngine]


class AdminRosterRow(BaseModel):
    """An engine that changes its model."""

    id: str
    models: list[str] = Field(description="What it may load.")
    serving: str
    is_loading: bool
    last: str = Field(description="What it had before it was put to sleep.")
    active: int = Field(description="Requests that it runs.")
    failed: dict[str, str] = Field(description="Models that it can't load, with the reasons.")
    postponed: list[str] = Field(description="Models that it tries to load again later.")


class AdminModel(BaseModel):
    """A model."""

    name: str
    created: int
    engines: int = Field(description="Engines that live now.")
    max_model_len: int


class AdminModels(BaseModel):
    """The models by name, and the engines that change theirs."""

    object: Literal["list"]
    data: list[AdminModel]
    roster: list[AdminRosterRow]


class AdminQueue(BaseModel):
    """What waits in one queue of a model, over all partitions."""

    model: str
    queue: str = Field(description='A priority class, "resume" (begun requests) or "suspect".')
    requests: int
    tokens: int
    oldest_s: float
    drain_rate: float = Field(description="Prompt tokens a second that engines claim from it.")


class AdminTenantQueue(BaseModel):
    """What waits of one tenant's requests that have not begun."""

    model: str
    queue: str
    tenant: str
    requests: int
    tokens: int


class AdminQueues(BaseModel):
    """All queues, and what of their classes is each tenant's."""

    object: Literal["list"]
    data: list[AdminQueue]
    tenants: list[AdminTenantQueue]


class AdminRequest(RequestAnswer):
    """Where a request stands, and whose it is."""

    tenant: str


class AdminUsageRow(BaseModel):
    """What one credential has used of one model in an hour or a day."""

    start_s: int = Field(description="Unix seconds of its begin.")
    span_s: int = Field(description="3600 or 86400.")
    tenant: str
    credential: str
    model: str
    requests: int = Field(description="That ended in this time.")
    prompt_tokens: int
    cached_tokens: int = Field(description="Of the prompt tokens, those found in a prefix cache.")
    output_tokens: int


class AdminUsage(BaseModel):
    """What tenants have used."""

    object: Literal["list"]
    data: list[AdminUsageRow]


class AdminQuarantined(BaseModel):
    """A request of which engines died."""

    id: str
    model: str
    tenant: str
    reason: str
    next_index: int = Field(description="Entries in its log when the engines died.")
    attempts: int
    engines: list[str]
    quarantined_at: float = Field(description="Unix seconds, by Redis' clock.")
    requeued_as: str | None = Field(description="The id under which it goes on.")


class AdminQuarantine(BaseModel):
    """The quarantined requests, oldest first."""

    object: Literal["list"]
    data: list[AdminQuarantined]
    has_more: bool


class AdminRelease(BaseModel):
    """The request under which a quarantined one goes on."""

    id: str


class AdminReload(BaseModel):
    """Something that was read again."""

    name: str
    changed: bool = Field(description="False also for what can't be used; the gateway's log says why.")


class AdminReloads(BaseModel):
    """What this gateway has read again."""

    object: Literal["list"]
    data: list[AdminReload]
