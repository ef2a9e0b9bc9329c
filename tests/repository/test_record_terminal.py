"""Recordings of commands: what a terminal showed, in its order, as an SVG."""

import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
from record_terminal import LAST_S, CommandError, record
from support.processes.waiting import LIMIT_S
from terminal_svg import Frame, Run, draw

SVG = "{http://www.w3.org/2000/svg}"


def test_a_line_that_is_written_over_is_shown_before_and_after() -> None:
    code = r"import time; print('one', end='', flush=True); time.sleep(1.2); print('\r\x1b[31mtwo\x1b[0m <&>')"
    frames = record([sys.executable, "-c", code], columns=20, rows=3, limit_s=LIMIT_S)
    shown = ["".join(run.text for run in frame.lines[0]).strip() for frame in frames]
    assert (shown[-2:], frames[-1].seconds) == (["one", "two <&>"], LAST_S)
    assert (frames[-1].lines[0][0].text, frames[-1].lines[0][0].colour) == ("two", "red")
    drawn = ElementTree.fromstring(draw(frames, 20, 'a "title"'))  # noqa: S314 - drawn here
    texts = ["".join(each.itertext()) for each in drawn.iter(f"{SVG}text")]
    assert texts[-1] == "two<&>"
    assert texts[0] == 'a "title"'


def test_a_command_that_fails_or_hangs_is_no_recording() -> None:
    with pytest.raises(CommandError, match="exit code 3"):
        record([sys.executable, "-c", "raise SystemExit(3)"], columns=20, rows=3, limit_s=LIMIT_S)
    with pytest.raises(CommandError, match="within 1 s"):
        record([sys.executable, "-c", "import time; time.sleep(60)"], columns=20, rows=3, limit_s=1)


def test_each_frame_has_its_share_of_the_time() -> None:
    frames = [Frame(seconds, ((Run(str(seconds), "default"),),)) for seconds in (1.0, 3.0)]
    drawn = draw(frames, 10, "title")
    assert "show 4.00s" in drawn
    assert "25.00%{transform:translateY(-66px)}" in drawn
