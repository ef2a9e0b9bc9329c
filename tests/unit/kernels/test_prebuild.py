"""Kernels compiled without a GPU are those that launches on one look for."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

pytestmark = [pytest.mark.builds, pytest.mark.slow]

COMPILE = """
import sys
from pagestream_kernels import prebuild
from pagestream_kernels.aot import TARGETS

tokens, prebuild._SEQUENCES, prebuild._BLOCKS, prebuild._PREFILLS, head_dim = map(int, sys.argv[1:])
prebuild._TOKENS = tokens
shape = prebuild.ModelShape(256, 512, 4, 2, head_dim, has_bias=True, has_head_norm=True)
prebuild.compile_shapes([shape], [TARGETS["sm_90"]])
"""
TAKE = """
import sys
from pathlib import Path
from pagestream_kernels.prebuild import take_prebuilt

print(take_prebuilt(Path(sys.argv[1])))
"""


def run(program: str, cache: Path, *arguments: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(cache)
    command = [sys.executable, "-c", program, *arguments]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.timeout(300)
def test_a_launch_finds_what_was_prebuilt(tmp_path: Path) -> None:
    prebuilt, cache = tmp_path / "prebuilt", tmp_path / "cache"
    run(COMPILE, prebuilt, "32", "16", "32", "4", "64")
    made = names(prebuilt)
    builds = Counter(path.stem for path in prebuilt.glob("*/*.cubin"))
    assert set(builds) == {
        "_rms_norm_kernel",
        "_rope_and_cache_kernel",
        "_prefill_kernel",
        "_plan_kernel",
        "_attend_kernel",
        "_merge_kernel",
        "_silu_and_mul_kernel",
        "_filter_and_draw_kernel",
        "_fixed_order_matmul_kernel",
    }
    assert builds["_plan_kernel"] == 3  # equal shares, fixed splits, and of several rows
    assert builds["_fixed_order_matmul_kernel"] >= 3  # few outputs and many, inputs of both sizes, a bias

    assert run(TAKE, cache, str(prebuilt)) == str(len(made))
    assert run(TAKE, cache, str(prebuilt)) == "0"
    shutil.rmtree(prebuilt)  # what was taken stands alone

    before = {path: path.stat().st_mtime_ns for path in cache.glob("*/*")}
    run(COMPILE, cache, "80", "48", "63", "3", "64")  # a launch with other counts, and parts off 16-byte borders
    assert {path: path.stat().st_mtime_ns for path in cache.glob("*/*")} == before
    run(COMPILE, cache, "32", "16", "32", "4", "128")
    assert names(cache) > made, "another head size needs other kernels"
