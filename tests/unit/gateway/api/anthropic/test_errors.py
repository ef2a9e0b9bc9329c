"""Every error has one of Anthropic's types."""

import json

import pytest
from pagestream_gateway.api.anthropic.errors import error_response
from pagestream_gateway.errors import (
    BodyTooLarge,
    GatewayError,
    GatewayStopping,
    HostNotAllowed,
    InvalidRequest,
    Overloaded,
    Unauthenticated,
)
from pagestream_streams.errors import ModelNotFound


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (InvalidRequest("a", "b"), 400, "invalid_request_error"),
        (Unauthenticated("no key"), 401, "authentication_error"),
        (HostNotAllowed("x"), 403, "permission_error"),
        (ModelNotFound("m"), 404, "not_found_error"),
        (BodyTooLarge(1), 413, "request_too_large"),
        (Overloaded("full", 3.0), 429, "rate_limit_error"),
        (GatewayStopping(), 503, "overloaded_error"),
        (ValueError("a secret"), 500, "api_error"),
    ],
)
def test_types(error: GatewayError, status: int, kind: str) -> None:
    answer = error_response(error, "r")
    body = json.loads(bytes(answer.body))
    assert (answer.status_code, body["type"], body["error"]["type"], body["request_id"]) == (status, "error", kind, "r")
    assert "secret" not in body["error"]["message"]
    assert ("retry-after" in answer.headers) == (status in (429, 503))
