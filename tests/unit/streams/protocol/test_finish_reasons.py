"""Names of finish reasons, derived from the proto enum."""

import pytest
from pagestream.v1.inference_pb2 import FINISH_REASON_UNSPECIFIED, FinishReason
from pagestream_streams.protocol.finish_reasons import FINISH_REASONS, finish_reason_name, parse_finish_reason


@pytest.mark.parametrize("reason", [value for value in FinishReason.values() if value])
def test_every_reason_of_the_proto_enum_has_a_name_that_is_read_back(reason: FinishReason) -> None:
    name = finish_reason_name(reason)
    assert f"FINISH_REASON_{name.upper()}" == FinishReason.Name(reason)
    assert parse_finish_reason(name) == reason


def test_the_stored_names_stay_what_they_are() -> None:
    """They are in Redis, in digests, in Lua scripts, and in the HTTP API."""
    assert list(FINISH_REASONS) == ["stop", "length", "cancelled", "deadline", "error"]


def test_an_unfinished_request_has_no_name_and_is_read_from_the_empty_one() -> None:
    assert parse_finish_reason("") == FINISH_REASON_UNSPECIFIED
    with pytest.raises(ValueError, match="expected one of stop, length"):
        finish_reason_name(FINISH_REASON_UNSPECIFIED)
    with pytest.raises(ValueError, match="unknown finish reason 'ended'"):
        parse_finish_reason("ended")
