"""The blocking gRPC client is what its generator makes of the one for asyncio."""

import subprocess
import sys
from pathlib import Path

import pytest
from support.processes.waiting import LIMIT_S

pytestmark = pytest.mark.served

TOOL = Path(__file__).resolve().parents[2] / "tools" / "generate_blocking_client.py"


def test_the_blocking_client_is_current() -> None:
    pytest.importorskip("unasync")
    done = subprocess.run(
        [sys.executable, TOOL, "--check"], capture_output=True, text=True, check=False, timeout=LIMIT_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
