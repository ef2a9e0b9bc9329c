"""From gRPC's errors to failures."""

from __future__ import annotations

from typing import Any

import grpc

from pagestream_client.failures import Code, Failure
from pagestream_client.grpc.details import details_in


def failure_of(error: grpc.RpcError) -> Failure:
    """Return the failure that an error of a call stands for, whether of grpc.aio or of the blocking API."""
    call: Any = error
    status: grpc.StatusCode = call.code() or grpc.StatusCode.UNKNOWN
    details = details_in(call.trailing_metadata())
    return Failure(
        Code[status.name], call.details() or status.name, details.reason, details.field, details.retry_after_s
    )
