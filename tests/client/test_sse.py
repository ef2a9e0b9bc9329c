import pytest
from hypothesis import given
from hypothesis import strategies as st
from pagestream_client.sse import MAX_EVENT_BYTES, Event, SseDecoder

STREAM = (
    b'id: r/1/aa\ndata: {"a": 1}\n\n: comment\n\ndata: first\ndata: second\r\n\r\n'
    b"event: x\nid: r/2/bb\n\ndata:tight\n\n"
)
EVENTS = [Event("r/1/aa", '{"a": 1}'), Event("", "first\nsecond"), Event("", "tight")]


@given(st.lists(st.integers(0, len(STREAM)), max_size=8))
def test_bytes_may_be_cut_anywhere(cuts: list[int]) -> None:
    decoder = SseDecoder()
    places = [0, *sorted(cuts), len(STREAM)]
    pieces = [STREAM[begin:end] for begin, end in zip(places, places[1:], strict=False)]  # noqa: RUF007
    assert [event for piece in pieces for event in decoder.feed(piece)] == EVENTS


def test_multi_byte_characters_may_be_cut_too() -> None:
    data = "data: höhe 🌊\n\n".encode()
    decoder = SseDecoder()
    events = [event for i in range(len(data)) for event in decoder.feed(data[i : i + 1])]
    assert events == [Event("", "höhe 🌊")]


def test_an_event_that_was_cut_off_is_never_returned() -> None:
    assert SseDecoder().feed(b"id: r/1/aa\ndata: half") == []
    assert SseDecoder().feed(b"id: r/1/aa\ndata: whole\n") == []


def test_an_endless_line_is_refused() -> None:
    with pytest.raises(ValueError, match="more than"):
        SseDecoder().feed(b"x" * (MAX_EVENT_BYTES + 1))
