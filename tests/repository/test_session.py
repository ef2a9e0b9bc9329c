"""What a session of pytest has started ends with it: in order, killed, or with a process that a test has forgotten."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.processes.reaper import processes_of
from support.processes.waiting import LIMIT_S, is_running, wait_until

pytestmark = pytest.mark.served

TESTS = Path(__file__).resolve().parents[1]
PLUGINS = ("-p", "support.processes.session", "-p", "no:cacheprovider")
STARTS = """
import asyncio, os, subprocess, sys, tempfile, time
from pathlib import Path
from pagestream_streams import EmbeddedRedis
from setproctitle import setproctitle

ORPHAN = "import os, time; os.fork() and os._exit(0); os.setsid(); print(os.getpid(), flush=True); time.sleep(600)"
TITLED = "import setproctitle, time; setproctitle.setproctitle('x' * 99); print('up', flush=True); time.sleep(600)"

def start(code):
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True)
    return process, process.stdout.readline()

SIGINT = "import signal; print(signal.getsignal(signal.SIGINT) is signal.SIG_IGN, flush=True)"

def test_that_starts_much(tmp_path):
    assert start(SIGINT)[1] == "False\\n"
    orphan, pid = start(ORPHAN)
    titled, _ = start(TITLED)
    redis = EmbeddedRedis(tmp_path / "redis")
    asyncio.run(redis.start())
    pids = [int(pid), titled.pid, redis.pid]
    report = Path(os.environ["REPORT"])
    report.with_suffix(".part").write_text(" ".join(map(str, [*pids, tmp_path, tempfile.gettempdir()])))
    report.with_suffix(".part").rename(report)
    if os.environ["THEN"] == "wait":
        time.sleep(600)
    os.kill(titled.pid, 9)
    redis.kill()
"""


def start(folder: Path, then: str, *options: str) -> tuple[subprocess.Popen[str], Path]:
    """Run pytest on a test that starts an orphan, a process with a long title, and a Redis.

    It does so in the background of a shell without a terminal, where what it starts is to be ended by Ctrl-C all the
    same.
    """
    file, report = folder / "test_it.py", folder / "report"
    file.write_text(STARTS)
    command = [sys.executable, "-m", "pytest", "-q", *PLUGINS, *options]
    environment = {**os.environ, "PYTHONPATH": str(TESTS), "REPORT": str(report), "THEN": then}
    command += ["--rootdir", str(folder), "-c", os.devnull, "--basetemp", str(folder / "base"), str(file)]
    background = ["bash", "-c", 'trap "" INT; exec "$@"', "bash", *command]
    process = subprocess.Popen(
        background, env=environment, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    wait_until(lambda: report.exists() or process.poll() is not None, "the processes are there")
    return process, report


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One with a short path: sockets are below it."""
    return tmp_path_factory.mktemp("s")


@pytest.mark.parametrize(
    "options", [pytest.param((), id="alone", marks=pytest.mark.slow), pytest.param(("-n", "1"), id="xdist")]
)
def test_nothing_is_left_of_a_session_that_was_killed(folder: Path, options: tuple[str, ...]) -> None:
    process, report = start(folder, "wait", *options)
    assert report.exists(), process.communicate()[0]
    *pids, _, temporary = report.read_text().split()
    assert all(is_running(int(pid)) for pid in pids)
    assert Path(temporary).is_relative_to(folder / "base")
    process.kill()
    process.communicate()
    wait_until(lambda: not any(is_running(int(pid)) for pid in pids), "they have ended")
    wait_until(lambda: not (folder / "base").exists(), "its folder was removed")
    wait_until(lambda: not processes_of("none", folder), "no server is left")


def test_a_process_that_a_test_has_left_fails_the_session(folder: Path) -> None:
    process, report = start(folder, "leave")
    said = process.communicate(timeout=LIMIT_S)[0]
    orphan = report.read_text().split()[0]
    assert process.returncode == pytest.ExitCode.TESTS_FAILED
    assert "1 passed" in said
    assert f"\n{orphan} " in said.partition("left behind")[2]
    wait_until(lambda: not is_running(int(orphan)), "it was killed")
