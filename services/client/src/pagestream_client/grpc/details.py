"""The parts of google.rpc's error model that gateways use (google/rpc/status.proto, error_details.proto).

Their descriptors are built here, in a separate pool: googleapis-common-protos would be a dependency for five messages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from google.protobuf import message_factory
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError

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
