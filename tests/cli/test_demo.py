"""`pagestream demo` with the demo model: real processes, really killed."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.processes.waiting import LIMIT_S, is_running, wait_until

pytestmark = [pytest.mark.served, pytest.mark.timeout(400)]


def demo_command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "pagestream_cli", "demo", "--streams", "3", *arguments]


def test_streams_are_identical_whatever_is_killed(tmp_path: Path) -> None:
    data = tmp_path / "data"
    command = demo_command("--tokens", "240", "--json", "--data-dir", str(data))
    done = subprocess.run(command, capture_output=True, text=True, timeout=360, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [kill["part"].partition("-")[0] for kill in found["kills"]] == ["engine", "gateway", "redis"]
    assert [each["identical"] for each in found["streams"]] == [True] * 3
    assert [each["tokens"] for each in found["streams"]] == [240] * 3
    assert len({each["digest"] for each in found["streams"]}) == 3
    assert max(each["attempts"] for each in found["streams"]) >= 2
    assert {"0", "1"} <= set("".join(each["owners"] for each in found["streams"]))
    assert not any(is_running(kill["pid"]) for kill in found["kills"])
    assert not (data / "serve.json").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_signal_leaves_nothing_also_in_the_background(
    tmp_path_factory: pytest.TempPathFactory, number: signal.Signals
) -> None:
    """A shell without a terminal has what it starts in the background ignore SIGINT."""
    temporary = tmp_path_factory.mktemp("t")  # short: Redis' socket is below it
    command = ["bash", "-c", 'exec "$@" & echo $!; wait', "bash", *demo_command("--tokens", "900")]
    environment = {**os.environ, "TMPDIR": str(temporary)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True) as shell:
        assert shell.stdout is not None
        demo = int(shell.stdout.readline())
        wait_until(
            lambda: len(pids_of(temporary)) >= 4 or shell.poll() is not None, "the parts have been started", LIMIT_S
        )
        pids = pids_of(temporary)
        assert pids, "it has ended"
        os.kill(demo, number)
        shell.wait(LIMIT_S)
    assert not any(is_running(pid) for pid in (demo, *pids))
    assert list(temporary.iterdir()) == []


def pids_of(folder: Path) -> list[int]:
    """Return the parts of the demonstration below a folder."""
    for file in folder.glob("pagestream-demo-*/serve.json"):
        record = json.loads(file.read_text())
        return [each["pid"] for each in record["processes"] if each["name"] != "serve" and each["pid"]]
    return []
