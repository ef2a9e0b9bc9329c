"""What serve does when its parts change, with or without a terminal and a working disk."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

import pytest
from pagestream_cli.__main__ import build_parser
from pagestream_cli.serve import Deployment, GatewayPorts, ModelChoice, Plan, PortPlan, Reporter, parse_options


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
