"""What a deployment tells of requests and models."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from pagestream.v1 import inference_pb2 as api

from pagestream_client.chunks import FinishReason, Usage, finish_reason_from_proto, usage_of


class RequestState(enum.StrEnum):
    """Where a request stands."""

    QUEUED = "queued"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True)
class RequestInfo:
    """Where a request stands, without its tokens."""

    request_id: str
    model: str
    state: RequestState
    queue_position: int | None
    """Requests before it in its queue; None unless queued."""
    finish_reason: FinishReason | None
    """None unless finished."""
    next_index: int
    """Entries in its log so far."""
    usage: Usage
    """So far."""
    attempts: int
    """How often an engine has claimed it."""


@dataclass(frozen=True)
class ModelInfo:
    """A model that can be asked."""

    name: str
    max_model_len: int
    """Most tokens of prompt and output together."""
    created: int
    """Unix seconds of its first publication."""
    engines: int
    """That run it now."""


_STATES = {
    api.REQUEST_STATE_QUEUED: RequestState.QUEUED,
    api.REQUEST_STATE_RUNNING: RequestState.RUNNING,
    api.REQUEST_STATE_FINISHED: RequestState.FINISHED,
}


def request_info_of(answer: api.GetRequestResponse) -> RequestInfo:
    """The message as a dataclass."""
    return RequestInfo(
        request_id=answer.request_id,
        model=answer.model,
        state=_STATES.get(answer.state, RequestState.QUEUED),
        queue_position=answer.queue_position if answer.HasField("queue_position") else None,
        finish_reason=finish_reason_from_proto(answer.finish_reason),
        next_index=answer.next_index,
        usage=usage_of(answer.usage),
        attempts=answer.attempts,
    )


def model_info_of(model: api.Model) -> ModelInfo:
    """The message as a dataclass."""
    return ModelInfo(model.name, model.max_model_len, model.created, model.engines)
