"""The fingerprint is of numerics: whoever renames a module has the same one, whoever raises a version another."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pagestream_engine
import pytest
from pagestream_engine.numerics_versions import NUMERICS

pytestmark = pytest.mark.served

SOURCES = Path(pagestream_engine.__file__).resolve().parent
MODEL = Path(__file__).resolve().parents[3] / "deploy" / "demo-model" / "model"
PRINT = """
import json, sys
from pagestream_engine import LLM, numerics_versions

def fingerprint():
    options = {"device": "cpu", "dtype": "float32", "max_model_len": 64, "num_gpu_blocks_override": 8}
    return LLM(sys.argv[1], **options).engine.fingerprint

found = {"": fingerprint()}
for name in sys.argv[2:]:
    numerics_versions.NUMERICS[name] += 1
    found[name] = fingerprint()
    numerics_versions.NUMERICS[name] -= 1
print(json.dumps({"file": numerics_versions.__file__, "found": found}))
"""


def fingerprints(path: str, *names: str) -> dict[str, str]:
    """Return an engine's fingerprint, and those with a raised version of each name, by the sources below `path`."""
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", PRINT, str(MODEL), *names]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=240)
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    assert Path(printed["file"]).is_relative_to(path)
    found: dict[str, str] = printed["found"]
    return found


def renamed(folder: Path, package: str, module: str, new: str) -> None:
    """Copy the engine, and rename a module of a package with all that imports it."""
    copy = folder / SOURCES.name
    shutil.copytree(SOURCES, copy, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / package / f"{module}.py").rename(copy / package / f"{new}.py")
    old, count = f"{SOURCES.name}.{package}.{module} ", 0
    for path in copy.rglob("*.py"):
        text = path.read_text()
        count += text.count(old)
        path.write_text(text.replace(old, f"{SOURCES.name}.{package}.{new} "))
    assert count, "nothing imports the module; name another one"


def test_a_renamed_module_has_the_same_fingerprint(tmp_path: Path) -> None:
    renamed(tmp_path, "sampler", "stages", "logits_stages")
    here, there = fingerprints(str(SOURCES.parent), *NUMERICS), fingerprints(str(tmp_path))
    assert there[""] == here[""]
    # What a CPU computes with names its engine; the Triton kernels do not.
    assert here["triton"] == here[""]
    assert len({here[name] for name in ("", "native", "torch", "sampling", "text")}) == 5
