"""No part outlives its supervisor."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pagestream_cli.supervisor
import pytest
from support.processes.waiting import LIMIT_S, is_running, wait_until

pytestmark = pytest.mark.served

GUARD = str(Path(str(pagestream_cli.supervisor.__file__)).with_name("guard.py"))
SUPERVISOR = """
import asyncio, sys
from pathlib import Path
from pagestream_cli.supervisor import PartSpec, Supervisor

class Printer:
    def changed(self, views): pass
    def died(self, view, death, restart_delay_s): print("died", flush=True)
    def line(self, spec, text): print(spec.name, supervisor.views[int(spec.name)].pid, flush=True)

code = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); signal.pause()"
parts = [PartSpec(str(i), (sys.executable, "-I", "-S", "-c", code), Path(sys.argv[1]) / f"{i}.log") for i in range(3)]
supervisor = Supervisor(parts, Printer())
asyncio.run(supervisor.run())
"""


def test_kill_9_of_the_supervisor_leaves_nothing(tmp_path: Path) -> None:
    supervisor = subprocess.Popen([sys.executable, "-c", SUPERVISOR, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert supervisor.stdout is not None
    with supervisor.stdout:
        pids = [int(supervisor.stdout.readline().split()[1]) for _ in range(3)]
        assert all(is_running(pid) for pid in pids)
        supervisor.send_signal(signal.SIGKILL)
        supervisor.wait(LIMIT_S)
        wait_until(lambda: not any(is_running(pid) for pid in pids), "no part is left")


def test_the_program_takes_over_the_process() -> None:
    command = [
        sys.executable,
        "-I",
        "-S",
        GUARD,
        str(os.getpid()),
        sys.executable,
        "-c",
        "import os; print(os.getpid())",
    ]
    program = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    said, _ = program.communicate(timeout=LIMIT_S)
    assert int(said) == program.pid


def test_a_supervisor_that_is_gone_already_starts_nothing() -> None:
    command = [sys.executable, "-I", "-S", GUARD, "1" if os.getpid() != 1 else "2", sys.executable, "-c", "print('up')"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert (done.returncode, done.stdout) == (1, "")


def test_a_missing_program_is_named() -> None:
    command = [sys.executable, "-I", "-S", GUARD, str(os.getpid()), "/no/such/program"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 127
    assert done.stderr == "cannot start /no/such/program: No such file or directory\n"
