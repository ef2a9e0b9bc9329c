"""What serve does when its parts change, with or without a terminal and a working disk."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

import pytest
from pagestream_cli import ProcessRecord, ServeRecord
from pagestream_cli.__main__ import build_parser
from pagestream_cli.serve import (
    Deployment,
    EngineLogs,
    GatewayPorts,
    ModelChoice,
    Plan,
    PortPlan,
    RepeatedLines,
    Reporter,
    parse_options,
)
from support.processes.waiting import LIMIT_S


@contextmanager
def terminal() -> Iterator[tuple[TextIO, int]]:
    """A terminal's two ends: what a program writes to, and what its window holds."""
    window, end = os.openpty()
    stream = os.fdopen(end, "w")
    try:
        yield stream, window
    finally:
        with suppress(OSError):
            stream.close()


def deployment(data_dir: Path) -> Deployment:
    options = parse_options(build_parser().parse_args(["serve", "--data-dir", str(data_dir)]))
    ports = PortPlan("redis://127.0.0.1:1/0", 1, (GatewayPorts(2, 3, None),), (None,))
    plan = Plan(options, ports, ModelChoice("somewhere", "demo"))
    return Deployment(plan, None, Reporter(started=0.0, verbose=False))


def test_a_terminal_that_has_gone_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal() as (stream, window):
        monkeypatch.setattr(sys, "stderr", stream)
        reporter = Reporter(started=0.0, verbose=False)
        reporter.loading("loading demo")
        os.close(window)
        reporter.say("engine-0 is back")
        reporter.loaded()
        reporter.say("ending")
        monkeypatch.undo()


def test_a_disk_that_refuses_serve_json_is_reported_and_ends_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "data"
    served = deployment(folder)
    served.changed(served.supervisor.views)
    assert "serve.json is not up to date" in capsys.readouterr().err
    folder.mkdir()
    served.changed(served.supervisor.views)
    assert (folder / "serve.json").exists()


class Clock:
    """A clock that stands still."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_lines_that_repeat_are_shown_once_and_counted() -> None:
    shown: list[str] = []
    clock = Clock()
    repeats = RepeatedLines(shown.append, clock)
    for number in range(40):
        repeats.add("engine-0", f"Redis does not answer, try {number}")
        repeats.add("gateway-0", "Redis does not answer, try again")
    assert shown == [
        "  engine-0 | Redis does not answer, try 0",
        " gateway-0 | Redis does not answer, try again",
    ]
    clock.now_s = 4.9
    repeats.tell()
    assert len(shown) == 2
    clock.now_s = 5.0
    repeats.tell()
    assert shown[2:] == [
        "  engine-0 | Redis does not answer, try 39 (39 more times)",
        " gateway-0 | Redis does not answer, try again (39 more times)",
    ]
    repeats.add("engine-0", "Redis does not answer, try 40")
    repeats.add("engine-0", "something else")
    repeats.tell(is_end=True)
    assert shown[4:] == [
        "  engine-0 | something else",
        "  engine-0 | Redis does not answer, try 40 (once more)",
    ]


def test_warnings_are_shown_without_a_terminal_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    served = deployment(tmp_path)
    (engine, *_) = [view.spec for view in served.supervisor.views if view.spec.name == "engine-0"]
    for _ in range(3):
        served.line(engine, '{"level": "WARNING", "message": "the disk is slow"}')
        served.line(engine, '{"level": "INFO", "message": "all is well"}')
    assert capsys.readouterr().err == "  engine-0 | the disk is slow\n"


def test_a_start_that_takes_long_says_what_it_waits_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """First after 30 s, then after twice as many."""
    served = deployment(tmp_path)
    (engine, *_) = [view.spec for view in served.supervisor.views if view.spec.name == "engine-0"]
    served.line(engine, '{"level": "INFO", "message": "3 of 8 files of weights are read"}')
    young, old = (
        Reporter(started=time.monotonic(), verbose=False),
        Reporter(started=time.monotonic() - 31, verbose=False),
    )
    for reporter in (young, old, old):
        reporter.tick(served.waiting)
    said = capsys.readouterr().err
    assert said.count("still waiting for engine-0, which loads the model") == 1
    assert "its last words: 3 of 8 files of weights are read" in said
    assert str(tmp_path / "logs" / "engine-0.log") in said


def test_the_start_screen_says_what_is_served_where_and_what_comes_next(capsys: pytest.CaptureFixture[str]) -> None:
    logs = EngineLogs()
    place = {"message": "the model computes on cpu in float32", "device": "cpu", "dtype": "float32"}
    logs.read("engine-0", json.dumps(place))
    logs.read("engine-0", json.dumps({"message": "ready", "engine_id": "engine-0:1", "max_model_len": 4096}))
    gateway = ProcessRecord("gateway-0", 1, {"http": 80, "grpc": 81})
    record = ServeRecord("small", "redis://", "127.0.0.1", (gateway,), 0.0)
    Reporter(started=0.0, verbose=False).start_screen(record, logs.facts, has_page=True, command="pagestream chat")
    rows = dict(line.split(maxsplit=1) for line in capsys.readouterr().err.splitlines())
    assert rows["model"] == "small, 4,096 tokens of context, float32 on cpu"
    assert (rows["page"], rows["docs"]) == ("http://127.0.0.1:80/", "http://127.0.0.1:80/docs")
    assert "http://127.0.0.1:80/v1" in rows["API"]
    assert "127.0.0.1:81" in rows["API"]
    assert rows["next"].startswith("pagestream chat")


@pytest.mark.parametrize(
    ("variable", "value", "is_coloured"), [("NO_COLOR", "1", False), ("TERM", "dumb", False), ("TERM", "xterm", True)]
)
def test_colours_and_spinners_are_for_terminals_that_take_them(variable: str, value: str, is_coloured: bool) -> None:
    environment = {**os.environ, "TERM": "xterm", "NO_COLOR": "", variable: value}
    with terminal() as (stream, window):
        code = (
            "import sys; from pagestream_cli.console import has_colours, is_watched; "
            "print(has_colours(sys.stdout), is_watched())"
        )
        command = [sys.executable, "-c", code]
        subprocess.run(command, stdout=stream, stderr=stream, env=environment, timeout=LIMIT_S, check=True)
        shown = os.read(window, 1 << 16).decode().split()
    assert shown == [str(is_coloured), str(value != "dumb")]


def test_the_next_command_is_found_where_the_path_does_not_name_it(tmp_path: Path) -> None:
    folder = Path(sys.executable).parent
    code = "from pagestream_cli.console import program; print(program())"
    found = [
        subprocess.check_output(
            [sys.executable, "-c", code], env={"PATH": path}, cwd=cwd, text=True, timeout=60
        ).strip()
        for path, cwd in ((str(folder), tmp_path), ("/nowhere", folder.parent.parent), ("/nowhere", tmp_path))
    ]
    assert found == [
        "pagestream",
        str(Path(folder.parent.name, folder.name, "pagestream")),
        str(folder / "pagestream"),
    ]
