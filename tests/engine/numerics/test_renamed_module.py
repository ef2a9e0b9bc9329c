"""The fingerprint is of numerics: whoever renames a module has the same one, whoever raises a version another."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pagestream_engine
import pytest
import torch
from pagestream_engine import LLM
from pagestream_engine.numerics_versions import NUMERICS

pytestmark = pytest.mark.served

SOURCES = Path(pagestream_engine.__file__).resolve().parent
MODEL = Path(__file__).resolve().parents[3] / "deploy" / "demo-model" / "model"
OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_model_len": 64, "num_gpu_blocks_override": 8}
PRINT = """
import json, sys
from pagestream_engine import LLM, numerics_versions
print(json.dumps([numerics_versions.__file__, LLM(sys.argv[1], **json.loads(sys.argv[2])).engine.fingerprint]))
"""


def fingerprint() -> str:
    return LLM(MODEL, **OPTIONS).engine.fingerprint


def fingerprint_by(path: Path) -> str:
    """Return an engine's fingerprint by the sources below `path`."""
    environment = {**os.environ, "PYTHONPATH": str(path), "OMP_NUM_THREADS": str(torch.get_num_threads())}
    command = [sys.executable, "-c", PRINT, str(MODEL), json.dumps(OPTIONS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=240)
    assert done.returncode == 0, done.stderr
    file, found = json.loads(done.stdout)
    assert Path(file).is_relative_to(path)
    return str(found)


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
    assert fingerprint_by(tmp_path) == fingerprint()


def test_a_raised_version_has_another_fingerprint(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"": fingerprint()}
    for name, version in NUMERICS.items():
        with monkeypatch.context() as patch:
            patch.setitem(NUMERICS, name, version + 1)
            found[name] = fingerprint()
    # What a CPU computes with names its engine; the Triton kernels do not.
    assert found["triton"] == found[""]
    assert len({found[name] for name in ("", "native", "torch", "sampling", "text")}) == 5
