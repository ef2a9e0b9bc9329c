import pytest
from pagestream.v1.records_pb2 import LogEntry
from pagestream_streams.protocol.entries import from_stream_fields, to_append_values


def test_token_has_six_arguments_in_the_script_s_order() -> None:
    entry = LogEntry(choice=1, token_id=5, text="é", digest="d")
    assert to_append_values(entry) == ("t", "1", "5", "é", "d", "")


def test_fields_give_the_entry() -> None:
    fields = {b"c": b"1", b"t": b"5", b"x": "é".encode(), b"d": b"d"}
    assert from_stream_fields(fields) == LogEntry(choice=1, token_id=5, text="é", digest="d")


def test_an_entry_without_a_body_is_refused() -> None:
    with pytest.raises(ValueError, match="no body"):
        to_append_values(LogEntry(text="x"))
