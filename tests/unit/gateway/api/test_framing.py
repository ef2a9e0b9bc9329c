"""The choice between events and lines by an Accept header."""

import pytest
from pagestream_gateway.api.transports.framing import accepts_lines


@pytest.mark.parametrize(
    ("accept", "lines"),
    [
        (None, False),
        ("*/*", False),
        ("text/event-stream", False),
        ("application/x-ndjson", True),
        ("Application/X-NDJSON; charset=utf-8", True),
        ("application/json, application/x-ndjson;q=0.5, */*;q=0.1", True),
        ("text/event-stream, application/x-ndjson", False),
        ("application/x-ndjson, text/event-stream", True),
        ("application/x-ndjson;q=0.5, text/event-stream", False),
        ("text/event-stream;q=0.5, application/x-ndjson;q=0.9", True),
        ("application/x-ndjson;q=0", False),
        ("application/x-ndjson;q=x", False),
        ("", False),
    ],
)
def test_lines_are_sent_to_those_who_prefer_them(accept: str | None, lines: bool) -> None:
    assert accepts_lines(accept) is lines
