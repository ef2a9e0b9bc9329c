"""What `pagestream demo` shows of its streams."""

from __future__ import annotations

import json

from pagestream_cli import demo
from pagestream_cli.demo import DemoStream, Kill, Timeline


def ended(text: str, *, completion_tokens: int = 4) -> DemoStream:
    return DemoStream("prompt", 1, 4, "id", [text], 4, completion_tokens, 1, 0.25, is_finished=True)


def test_a_stream_is_identical_where_it_ended_with_the_same_text_and_tokens() -> None:
    assert demo.is_identical(ended("abc"), ended("abc"))
    for other in (ended("abd"), ended("abc", completion_tokens=3), DemoStream("prompt", 1, 4, "id", ["abc"], 4, 4)):
        assert not demo.is_identical(ended("abc"), other)


def test_a_difference_is_told_in_the_table_the_verdict_and_the_json() -> None:
    first, second = [ended("abc"), ended("xyz")], [ended("abc"), ended("xyx")]
    timeline = Timeline([0.0], ["00"], [Kill(0.0, "engine-0", 7)])
    rows = demo.table(first, second).splitlines()
    assert rows[1].endswith("identical")
    assert rows[2].endswith("DIFFERENT")
    assert demo.verdict(first, second, timeline) == (
        "1 of 2 streams are identical to the undisturbed ones; killed: engine-0"
    )
    found = json.loads(demo.as_json(first, second, timeline))
    assert [each["identical"] for each in found["streams"]] == [True, False]
    assert found["kills"] == [{"at_s": 0.0, "part": "engine-0", "pid": 7}]
