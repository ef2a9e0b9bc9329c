"""docs/fields.md."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_the_page_has_the_fields_of_now() -> None:
    ended = subprocess.run([sys.executable, "tools/write_fields.py", "--check"], cwd=ROOT, timeout=60, check=False)
    assert ended.returncode == 0, "run: python tools/write_fields.py"
