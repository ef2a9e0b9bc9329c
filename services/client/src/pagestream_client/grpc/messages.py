"""From the answers of the wire contract to the client's types, and from gRPC's errors to failures.

The descriptors of google.rpc's error model (google/rpc/status.proto, error_details.proto), as far as gateways use it,
are built here, in a separate pool: googleapis-common-protos would be a dependency for five messages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import grpc
from google.protobuf import message_factory
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError
from pagestream.v1 import inference_pb2 as api

from pagestream_client.answers import (
    Chunk,
    Embeddings,
    FinishReason,
    Logprob,
    ModelInfo,
    RequestError,
    RequestInfo,
    RequestState,
    Scores,
    Usage,
)
from pagestream_client.retry import Code, Failure

_REASONS: dict[int, FinishReason] = {
    value: FinishReason(name.removeprefix("FINISH_REASON_").lower())
    for name, value in api.FinishReason.items()
    if value
}


def finish_reason_from_proto(reason: int) -> FinishReason | None:
    """Return the reason of a proto enum value: None for UNSPECIFIED, ERROR for a value that this client lacks."""
    return _REASONS.get(reason, FinishReason.ERROR) if reason else None


def usage_of(usage: api.Usage) -> Usage:
    """Return the message as a dataclass."""
    return Usage(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens)


def chunk_of(chunk: api.TokenChunk) -> Chunk:
    """Return the message as a dataclass."""
    return Chunk(
        request_id=chunk.request_id,
        next_index=chunk.next_index,
        digest=chunk.digest,
        choice=chunk.choice,
        token_ids=tuple(chunk.token_ids),
        text=chunk.text,
        logprobs=tuple(_logprobs_of(each) for each in chunk.logprobs),
        finish_reason=finish_reason_from_proto(chunk.finish_reason),
        stop_reason=chunk.stop_reason,
        usage=usage_of(chunk.usage) if chunk.HasField("usage") else None,
        error=RequestError(chunk.error.code, chunk.error.message) if chunk.HasField("error") else None,
    )


def _logprobs_of(position: api.TokenLogprobs) -> tuple[Logprob, ...]:
    return tuple(Logprob(each.token_id, each.logprob, each.rank, each.text) for each in position.entries)


_STATES = {
    api.REQUEST_STATE_QUEUED: RequestState.QUEUED,
    api.REQUEST_STATE_RUNNING: RequestState.RUNNING,
    api.REQUEST_STATE_FINISHED: RequestState.FINISHED,
}


def request_info_of(answer: api.GetRequestResponse) -> RequestInfo:
    """Return the message as a dataclass."""
    return RequestInfo(
        request_id=answer.request_id,
        model=answer.model,
        state=_STATES.get(answer.state, RequestState.QUEUED),
        queue_position=answer.queue_position if answer.HasField("queue_position") else None,
        expected_wait_ms=answer.expected_wait_ms if answer.HasField("expected_wait_ms") else None,
        finish_reason=finish_reason_from_proto(answer.finish_reason),
        next_index=answer.next_index,
        usage=usage_of(answer.usage),
        attempts=answer.attempts,
    )


def model_info_of(model: api.Model) -> ModelInfo:
    """Return the message as a dataclass."""
    return ModelInfo(model.name, model.max_model_len, model.created, model.engines)


def embeddings_of(answer: api.EmbedResponse) -> Embeddings:
    """Return the message as a dataclass."""
    return Embeddings(answer.request_id, [tuple(each.values) for each in answer.embeddings], usage_of(answer.usage))


def scores_of(answer: api.ScoreResponse) -> Scores:
    """Return the message as a dataclass."""
    return Scores(answer.request_id, tuple(answer.scores), usage_of(answer.usage))


def failure_of(error: grpc.RpcError) -> Failure:
    """Return the failure that an error of a call stands for, whether of grpc.aio or of the blocking API."""
    call: Any = error
    status: grpc.StatusCode = call.code() or grpc.StatusCode.UNKNOWN
    details = details_in(call.trailing_metadata())
    return Failure(
        Code[status.name], call.details() or status.name, details.reason, details.field, details.retry_after_s
    )


_KEY = "grpc-status-details-bin"
_PACKAGE = "pagestream.details"


@dataclass(frozen=True)
class Details:
    """Details of an error beside its status."""

    reason: str = ""
    """google.rpc.ErrorInfo.reason."""
    field: str | None = None
    """The first of google.rpc.BadRequest's fields."""
    retry_after_s: float | None = None
    """google.rpc.RetryInfo."""


def details_in(metadata: Any) -> Details:
    """Return the details in a call's trailing metadata; empty ones where there are none that can be decoded."""
    for key, value in metadata or ():
        if key == _KEY:
            try:
                return _read(value)
            except DecodeError:
                break  # not written by a gateway, perhaps by a proxy
    return Details()


def _read(data: bytes) -> Details:
    reason, field, retry_after_s = "", None, None
    for detail in _STATUS.FromString(data).details:
        match detail.type_url.rpartition("/")[2]:
            case "google.rpc.ErrorInfo":
                reason = _ERROR_INFO.FromString(detail.value).reason
            case "google.rpc.BadRequest":
                violations = _BAD_REQUEST.FromString(detail.value).field_violations
                field = violations[0].field if violations else None
            case "google.rpc.RetryInfo":
                delay = _RETRY_INFO.FromString(detail.value).retry_delay
                retry_after_s = delay.seconds + delay.nanos / 1e9
    return Details(reason, field, retry_after_s)


class _Field(NamedTuple):
    name: str
    number: int
    kind: FieldDescriptorProto.Type.ValueType
    message: str = ""
    label: FieldDescriptorProto.Label.ValueType = FieldDescriptorProto.LABEL_OPTIONAL


_INT32, _INT64 = FieldDescriptorProto.TYPE_INT32, FieldDescriptorProto.TYPE_INT64
_STRING, _BYTES = FieldDescriptorProto.TYPE_STRING, FieldDescriptorProto.TYPE_BYTES
_MESSAGE, _REPEATED = FieldDescriptorProto.TYPE_MESSAGE, FieldDescriptorProto.LABEL_REPEATED
_MESSAGES: dict[str, tuple[_Field, ...]] = {
    "Any": (_Field("type_url", 1, _STRING), _Field("value", 2, _BYTES)),
    "Status": (_Field("details", 3, _MESSAGE, "Any", _REPEATED),),
    "ErrorInfo": (_Field("reason", 1, _STRING),),
    "FieldViolation": (_Field("field", 1, _STRING),),
    "BadRequest": (_Field("field_violations", 1, _MESSAGE, "FieldViolation", _REPEATED),),
    "Duration": (_Field("seconds", 1, _INT64), _Field("nanos", 2, _INT32)),
    "RetryInfo": (_Field("retry_delay", 1, _MESSAGE, "Duration"),),
}


def _pool() -> DescriptorPool:
    file = FileDescriptorProto(name="pagestream/details.proto", package=_PACKAGE, syntax="proto3")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for each in fields:
            field = message.field.add(name=each.name, number=each.number, type=each.kind, label=each.label)
            if each.message:
                field.type_name = f".{_PACKAGE}.{each.message}"
    pool = DescriptorPool()
    pool.Add(file)
    return pool


def _class(pool: DescriptorPool, name: str) -> Any:
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}"))


_POOL = _pool()
_STATUS, _ERROR_INFO = _class(_POOL, "Status"), _class(_POOL, "ErrorInfo")
_BAD_REQUEST, _RETRY_INFO = _class(_POOL, "BadRequest"), _class(_POOL, "RetryInfo")
