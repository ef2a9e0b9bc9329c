import pytest
from hypothesis import given
from hypothesis import strategies as st
from pagestream_gateway.api.openai.position import Position
from pagestream_gateway.errors import InvalidRequest


@given(st.integers(0, 2**63 - 1), st.text("0123456789abcdef", max_size=16))
def test_an_id_is_read_as_it_was_written(index: int, digest: str) -> None:
    place = Position(index, digest)
    assert Position.parse(place.event_id("r-1"), "r-1") == place


@given(st.text(max_size=30))
def test_anything_else_is_refused_by_name(text: str) -> None:
    if text.startswith("r/"):
        text = text[2:]
    with pytest.raises(InvalidRequest) as caught:
        Position.parse(text, "r")
    assert caught.value.field == "Last-Event-ID"


@pytest.mark.parametrize("text", ["", "-1", "1.5", "x", "٣", str(2**63), "1e3"])
def test_indices(text: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Position.parse_index(text)
    assert caught.value.field == "from"
