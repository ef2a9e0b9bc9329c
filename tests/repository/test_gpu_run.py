"""`make gpu` on a machine without a GPU: its dry run, and the page that it writes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "tests" / "benchmarks" / "gpu"
PAGE = ROOT / "docs" / "benchmarks" / "gpu.md"
RECORD = PAGE.with_suffix(".json")
sys.path.insert(0, str(FOLDER))
from page import NOT_MEASURED, SECTIONS, page  # noqa: E402


@pytest.mark.builds
@pytest.mark.slow
@pytest.mark.timeout(180)
def test_dry_run_runs_every_section_and_measures_nothing() -> None:
    command = [sys.executable, str(FOLDER / "run.py"), "--dry-run"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=170)
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout[done.stdout.index("{") :])
    assert record["sections"].keys() == SECTIONS.keys()
    figures = [figure for name, figures in record["sections"].items() if name != "launch" for figure in figures]
    assert len(figures) >= 9
    values = [value for figure in figures for key, value in figure.items() if key not in ("name", "late_compilations")]
    assert set(values) == {None}


def test_page_is_what_the_last_run_has_found() -> None:
    record = json.loads(RECORD.read_text()) if RECORD.exists() else None
    assert PAGE.read_text() == page(record)


def test_page_shows_what_was_measured_and_nothing_else() -> None:
    row = {"name": "batch 1, context 1k", "ms": 0.5, "copy_share": 0.87, "teraflops": None}
    record = {
        "gpu": "a GPU",
        "torch": "2",
        "cuda": "13",
        "copy_gigabytes_per_s": 4000.0,
        "correctness": "3 passed in 1 s",
        "sections": {"decode": [row]},
    }
    text = page(record)
    assert f"| batch 1, context 1k | 0.500 ms | 87% | {NOT_MEASURED} |" in text
    assert text.count("| all |") == len(SECTIONS) - 1
