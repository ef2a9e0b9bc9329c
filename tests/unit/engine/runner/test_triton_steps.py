"""Decodes on the Triton kernels can be recorded, and the warm-up leaves no kernel to compile: all but the capture."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.engines import triton_steps
from support.engines.tiny_models import make_model

pytestmark = [pytest.mark.builds, pytest.mark.slow]


@pytest.mark.timeout(300)
def test_recorded_steps_repeat_and_warmed_kernels_suffice(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", "qwen3-window", num_hidden_layers=2)
    tests = Path(triton_steps.__file__).parents[2]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tests)}
    command = [sys.executable, triton_steps.__file__, str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    recorded, by_torch = found["tokens"]
    assert recorded == by_torch
    assert [len(recorded[str(number)]) for number in range(4)] == [6, 7, 8, 9]
    assert found["checked"] >= 6
    assert len(found["kernels"]) >= 5
    assert found["late"] == []
