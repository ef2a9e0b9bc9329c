"""Errors as gRPC status with google.rpc details."""

from typing import NoReturn

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

from pagestream_gateway.core.problems import Problem

_DETAILS_KEY = "grpc-status-details-bin"
_DOMAIN = "pagestream.dev"


async def abort(context: "grpc.aio.ServicerContext[bytes, bytes]", problem: Problem) -> NoReturn:
    """Ends the call with the problem's status, a field violation where a field is wrong, and a delay where a retry may
    help.
    """
    details = [_packed(detail) for detail in _details(problem)]
    status = status_pb2.Status(code=problem.grpc_status.value[0], message=problem.message, details=details)
    await context.abort(problem.grpc_status, problem.message, ((_DETAILS_KEY, status.SerializeToString()),))
    raise AssertionError("abort does not return")


def _details(problem: Problem) -> list[Message]:
    details: list[Message] = [error_details_pb2.ErrorInfo(reason=problem.code.upper(), domain=_DOMAIN)]
    if problem.field is not None:
        violation = error_details_pb2.BadRequest.FieldViolation(field=problem.field, description=problem.message)
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if problem.retry_after_s is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromNanoseconds(round(problem.retry_after_s * 1e9))
        details.append(retry)
    return details


def _packed(detail: Message) -> AnyMessage:
    packed = AnyMessage()
    packed.Pack(detail)
    return packed
