import grpc
import pytest
from pagestream_gateway import errors
from pagestream_gateway.api.error_codes import error_report
from pagestream_streams import errors as streams


@pytest.mark.parametrize(
    ("error", "http_status", "grpc_status"),
    [
        (errors.InvalidRequest("n", "x"), 400, grpc.StatusCode.INVALID_ARGUMENT),
        (errors.Unauthenticated("x"), 401, grpc.StatusCode.UNAUTHENTICATED),
        (errors.HostNotAllowed("x"), 403, grpc.StatusCode.PERMISSION_DENIED),
        (errors.BodyTooLarge(5), 413, grpc.StatusCode.RESOURCE_EXHAUSTED),
        (errors.Overloaded("x", 2.5), 429, grpc.StatusCode.RESOURCE_EXHAUSTED),
        (errors.GatewayStopping(), 503, grpc.StatusCode.UNAVAILABLE),
        (errors.GenerationFailed("", ""), 500, grpc.StatusCode.INTERNAL),
        (
            streams.QueueFull(limit="requests", bound=1, queued=1, retry_after_s=2.5),
            429,
            grpc.StatusCode.RESOURCE_EXHAUSTED,
        ),
        (streams.LogsFull(wanted=2, held=3, limit=4, retry_after_s=2.5), 429, grpc.StatusCode.RESOURCE_EXHAUSTED),
        (errors.AnswerTooLarge("r", 5), 400, grpc.StatusCode.RESOURCE_EXHAUSTED),
        (streams.Unavailable("redis://user:password@host"), 503, grpc.StatusCode.UNAVAILABLE),
        (streams.ModelNotFound("m"), 404, grpc.StatusCode.NOT_FOUND),
        (streams.RequestNotFound("r"), 404, grpc.StatusCode.NOT_FOUND),
        (streams.OffsetOutOfRange("r", 5, 3), 416, grpc.StatusCode.OUT_OF_RANGE),
        (streams.DigestMismatch("r", 5), 409, grpc.StatusCode.DATA_LOSS),
        (streams.IdempotencyConflict("k"), 409, grpc.StatusCode.ALREADY_EXISTS),
        (KeyError("secret"), 500, grpc.StatusCode.INTERNAL),
    ],
)
def test_both_forms(error: Exception, http_status: int, grpc_status: grpc.StatusCode) -> None:
    report = error_report(error)
    assert (report.http_status, report.grpc_status) == (http_status, grpc_status)
    assert report.message
    assert report.code
    assert "password" not in report.message
    assert "secret" not in report.message


def test_what_is_full_has_a_retry_delay() -> None:
    full = streams.QueueFull(limit="requests", bound=1, queued=1, retry_after_s=2.5)
    assert error_report(full).retry_after_s == error_report(errors.Overloaded("x", 2.5)).retry_after_s == 2.5
    assert error_report(errors.InvalidRequest("n", "x")).retry_after_s is None


def test_every_error_of_the_streams_has_its_own_entry() -> None:
    # The root, and those that no call here can raise.
    unlisted = {streams.StreamsError, streams.ServerNotFound, streams.ModelInUse, streams.RequestsUnfinished}
    for name, kind in vars(streams).items():
        if isinstance(kind, type) and issubclass(kind, streams.StreamsError) and kind not in unlisted:
            made = kind.__new__(kind, *("x",))
            vars(made).update(name="x", retry_after_s=1.0, rates=())
            assert error_report(made).code != "internal_error", name
