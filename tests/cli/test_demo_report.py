"""What `pagestream demo` shows of its streams."""

from __future__ import annotations

import argparse
import json

import pytest
from pagestream_cli.demo import report
from pagestream_cli.demo.options import add_arguments
from pagestream_cli.demo.streams import DemoStream, fraction_read, new_streams
from pagestream_cli.demo.timeline import NO_OWNER, Kill, Timeline, character_of, kind_of


def ended(text: str, *, completion_tokens: int = 4) -> DemoStream:
    return DemoStream("prompt", 1, 4, "id", [text], 4, completion_tokens, 1, 0.25, is_finished=True)


def test_a_row_has_the_last_sample_of_each_part_of_the_time() -> None:
    timeline = Timeline()
    for at_s, owners in ((0.0, "00"), (0.4, "01"), (2.4, "·1"), (4.0, " 1")):
        timeline.add(at_s, owners)
    assert timeline.row(0, 4) == "00· "
    assert timeline.row(1, 4) == "1111"


def test_kills_stand_above_their_time() -> None:
    timeline = Timeline(times_s=[0.0, 10.0], owners=["0", "1"])
    timeline.kills += [Kill(2.5, "engine-1", 11), Kill(5.0, "gateway-0", 12), Kill(10.0, "redis", 13)]
    assert timeline.marks(4) == " EGR"


def test_an_engine_is_shown_by_its_number() -> None:
    assert character_of("engine-1-40123:3f2a") == "1"
    assert character_of("") == NO_OWNER
    assert [kind_of(part) for part in ("engine-1", "gateway-0", "redis")] == ["engine", "gateway", "redis"]


def test_a_stream_is_identical_where_it_ended_with_the_same_text_and_tokens() -> None:
    assert report.is_identical(ended("abc"), ended("abc"))
    for other in (ended("abd"), ended("abc", completion_tokens=3), DemoStream("prompt", 1, 4, "id", ["abc"], 4, 4)):
        assert not report.is_identical(ended("abc"), other)


def test_a_difference_is_told_in_the_table_the_verdict_and_the_json() -> None:
    first, second = [ended("abc"), ended("xyz")], [ended("abc"), ended("xyx")]
    timeline = Timeline([0.0], ["00"], [Kill(0.0, "engine-0", 7)])
    rows = report.table(first, second).splitlines()
    assert rows[1].endswith("identical")
    assert rows[2].endswith("DIFFERENT")
    assert report.verdict(first, second, timeline) == (
        "1 of 2 streams are identical to the undisturbed ones; killed: engine-0"
    )
    found = json.loads(report.as_json(first, second, timeline))
    assert [each["identical"] for each in found["streams"]] == [True, False]
    assert found["kills"] == [{"at_s": 0.0, "part": "engine-0", "pid": 7}]


def test_streams_have_seeds_of_their_own_and_progress_is_over_all() -> None:
    streams = new_streams(3, 10, 5)
    assert [each.seed for each in streams] == [5, 6, 7]
    streams[0].next_index, streams[1].is_finished = 5, True
    assert fraction_read(streams) == 0.5


@pytest.mark.parametrize("given", [["--kill", "engine,disk"], ["--streams", "0"], ["--tokens", "99999"]])
def test_other_values_are_refused(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    with pytest.raises(SystemExit):
        parser.parse_args(given)
    assert "expected" in capsys.readouterr().err
