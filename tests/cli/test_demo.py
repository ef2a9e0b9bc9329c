"""`pagestream demo` with the demo model: real processes, really killed."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.processes.waiting import is_running, wait_until

pytestmark = pytest.mark.timeout(240)


def demo_command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "pagestream_cli", "demo", "--streams", "3", *arguments]


def test_streams_are_identical_whatever_is_killed(tmp_path: Path) -> None:
    data = tmp_path / "data"
    command = demo_command("--tokens", "240", "--json", "--data-dir", str(data))
    done = subprocess.run(command, capture_output=True, text=True, timeout=220, check=False)
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


def test_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    data = tmp_path / "data"
    process = subprocess.Popen(
        demo_command("--tokens", "900", "--data-dir", str(data)),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        wait_until((data / "loaded").exists, "an engine has loaded the model", 120)
        record = json.loads((data / "serve.json").read_text())
        pids = [each["pid"] for each in record["processes"] if each["name"] != "serve" and each["pid"]]
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(60) == 130
        assert len(pids) >= 4
        assert not any(is_running(pid) for pid in pids)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
