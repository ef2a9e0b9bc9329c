"""Errors as gRPC status with details of google.rpc."""

from typing import NoReturn

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

from pagestream_gateway.api.error_codes import ErrorReport

_DETAILS_KEY = "grpc-status-details-bin"
_DOMAIN = "pagestream.dev"


async def abort(context: "grpc.aio.ServicerContext[bytes, bytes]", report: ErrorReport) -> NoReturn:
    """End the call with the report's status and details.

    The details name the field that is wrong and the delay after which a retry may succeed, where there is one.
    """
    details = [_packed(detail) for detail in _details(report)]
    status = status_pb2.Status(code=report.grpc_status.value[0], message=report.message, details=details)
    metadata = (*report.headers.items(), (_DETAILS_KEY, status.SerializeToString()))
    await context.abort(report.grpc_status, report.message, metadata)
    raise AssertionError("abort does not return")


def drop_frames(error: BaseException) -> None:
    """Let go of the frames in which an error and its causes were raised, and so of the request's data in them.

    Errors of futures are in cycles with their frames, which would stay until the next garbage collection.
    """
    following: BaseException | None = error
    while following is not None:
        following.__traceback__ = None
        following = following.__cause__ or following.__context__


def _details(report: ErrorReport) -> list[Message]:
    details: list[Message] = [error_details_pb2.ErrorInfo(reason=report.code.upper(), domain=_DOMAIN)]
    if report.field is not None:
        violation = error_details_pb2.BadRequest.FieldViolation(field=report.field, description=report.message)
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if report.retry_after_s is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromNanoseconds(round(report.retry_after_s * 1e9))
        details.append(retry)
    return details


def _packed(detail: Message) -> AnyMessage:
    packed = AnyMessage()
    packed.Pack(detail)
    return packed
