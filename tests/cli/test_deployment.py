"""What serve does when its parts change, with or without a terminal and a working disk."""

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

import pytest
from pagestream_cli.__main__ import build_parser
from pagestream_cli.serve.deployment import Deployment
from pagestream_cli.serve.model import ModelChoice
from pagestream_cli.serve.options import parse_options
from pagestream_cli.serve.plan import Plan
from pagestream_cli.serve.port_plan import GatewayPorts, PortPlan
from pagestream_cli.serve.report import Reporter
from pagestream_cli.supervisor.part import PartState, PartView
from pagestream_cli.supervisor.restart import Death

KILLED = Death(lived_s=1.0, was_ready=True, exit_code=-signal.SIGKILL)


@contextmanager
def lost_pipe() -> Iterator[TextIO]:
    """A pipe without a reader: `serve 2>&1 | tee log` after the end of tee."""
    reading, writing = os.pipe()
    stream = os.fdopen(writing, "w")
    os.close(reading)
    try:
        yield stream
    finally:
        with suppress(OSError):  # what could not be written is written again at the end
            stream.close()


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


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Engines that were expired in Redis."""
    expired: list[str] = []

    class Queue:
        def __init__(self, *_: object) -> None:
            self.expire = expired.append

    monkeypatch.setattr("pagestream_cli.serve.deployment.RedisActions", Queue)
    return expired


def deployment(data_dir: Path) -> Deployment:
    options = parse_options(build_parser().parse_args(["serve", "--data-dir", str(data_dir)]))
    ports = PortPlan("redis://127.0.0.1:1/0", 1, (GatewayPorts(2, 3, None),), (None,))
    plan = Plan(options, ports, ModelChoice("somewhere", "demo"))
    return Deployment(plan, None, Reporter(started=0.0, verbose=False))


def engine(served: Deployment) -> PartView:
    """The engine, which has said that it claims."""
    view = served.supervisor.views[0]
    assert view.spec.name == "engine-0"
    served.line(view.spec, json.dumps({"message": "ready", "engine_id": "engine-0.boot"}))
    return view


def test_redis_hears_of_a_dead_engine_before_the_terminal(
    tmp_path: Path, queue: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    monkeypatch.setattr("pagestream_cli.serve.report.say", lambda text: order.append(f"{text} | expired {queue}"))
    served = deployment(tmp_path)
    served.died(engine(served), KILLED, 0.0)
    assert order[0] == "engine-0 died (SIGKILL) after 1.0 s; it restarts now | expired ['engine-0.boot']"


def test_a_closed_pipe_hides_nothing_from_redis(
    tmp_path: Path, queue: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    served = deployment(tmp_path)
    view = engine(served)
    with lost_pipe() as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        served.died(view, KILLED, 0.0)
        served.changed([PartView(view.spec, PartState.READY, 1, 1)])
        monkeypatch.undo()
    assert queue == ["engine-0.boot"]
    assert (tmp_path / "serve.json").exists()


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
    tmp_path: Path, queue: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "data"
    served = deployment(folder)
    served.changed(served.supervisor.views)
    assert "serve.json is not up to date" in capsys.readouterr().err
    folder.mkdir()
    served.changed(served.supervisor.views)
    assert (folder / "serve.json").exists()
