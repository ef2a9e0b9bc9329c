"""gRPC's errors as a gateway writes them."""

import grpc
import pytest
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]
from pagestream_client import (
    IdempotencyConflict,
    InvalidRequest,
    ModelNotFound,
    OffsetOutOfRange,
    QueueFull,
    RequestNotFound,
    Unavailable,
)
from pagestream_client.failures import Code, Failure, error_of
from pagestream_client.grpc.details import Details, details_in
from pagestream_client.grpc.status import failure_of


def packed(*details: Message) -> bytes:
    messages = []
    for detail in details:
        messages.append(AnyMessage())
        messages[-1].Pack(detail)
    data: bytes = status_pb2.Status(code=8, message="m", details=messages).SerializeToString()
    return data


def rpc_error(code: Code, message: str | None, data: bytes | None = None) -> grpc.aio.AioRpcError:
    trailing = grpc.aio.Metadata(("other", "value"))
    if data is not None:
        trailing.add("grpc-status-details-bin", data)
    return grpc.aio.AioRpcError(grpc.StatusCode[code.name], grpc.aio.Metadata(), trailing, details=message)


def test_a_gateways_words_are_read() -> None:
    retry = error_details_pb2.RetryInfo()
    retry.retry_delay.FromMilliseconds(1_250)
    info = error_details_pb2.ErrorInfo(reason="QUEUE_FULL", domain="pagestream.dev")
    failure = failure_of(rpc_error(Code.RESOURCE_EXHAUSTED, "full", packed(info, retry)))
    assert failure == Failure(Code.RESOURCE_EXHAUSTED, "full", "QUEUE_FULL", None, 1.25)
    error = error_of(failure)
    assert isinstance(error, QueueFull)
    assert error.retry_after_s == 1.25


def test_the_field_that_is_wrong_is_named() -> None:
    violation = error_details_pb2.BadRequest.FieldViolation(field="sampling.n", description="too many")
    data = packed(error_details_pb2.BadRequest(field_violations=[violation]))
    error = error_of(failure_of(rpc_error(Code.INVALID_ARGUMENT, "sampling.n: too many", data)))
    assert isinstance(error, InvalidRequest)
    assert (error.field, str(error)) == ("sampling.n", "sampling.n: too many")


def test_unknown_details_and_no_details_are_none() -> None:
    assert details_in(()) == Details()
    assert details_in(None) == Details()
    help_link = error_details_pb2.Help()
    assert details_in([("grpc-status-details-bin", packed(help_link))]) == Details()
    assert details_in([("grpc-status-details-bin", b"\xff\xff")]) == Details()


def test_an_error_without_words_has_the_name_of_its_status() -> None:
    assert failure_of(rpc_error(Code.UNAVAILABLE, None)).message == "UNAVAILABLE"


@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        (Failure(Code.NOT_FOUND, "", "MODEL_NOT_FOUND"), ModelNotFound),
        (Failure(Code.NOT_FOUND, "", "REQUEST_NOT_FOUND"), RequestNotFound),
        (Failure(Code.OUT_OF_RANGE, "", "OFFSET_OUT_OF_RANGE"), OffsetOutOfRange),
        (Failure(Code.ALREADY_EXISTS, "", "IDEMPOTENCY_CONFLICT"), IdempotencyConflict),
        (Failure(Code.UNKNOWN, "Stream removed"), Unavailable),
        (Failure(Code.RESOURCE_EXHAUSTED, "too large", "BODY_TOO_LARGE"), InvalidRequest),
    ],
)
def test_errors_have_types(failure: Failure, expected: type[Exception]) -> None:
    assert type(error_of(failure)) is expected
