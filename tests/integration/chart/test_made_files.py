"""Files that helm and helm-docs make are as they would be made now."""

import runpy
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.kubernetes.api import kube_binary, run_tool
from support.kubernetes.chart import CHART, ROOT

TOOL: dict[str, Any] = runpy.run_path(str(ROOT / "tools" / "generate_chart.py"))


@pytest.mark.parametrize(("part", "binary"), [("collector", "helm"), ("readme", "helm-docs")])
def test_is_up_to_date(part: str, binary: str) -> None:
    kube_binary(binary)
    for path, text in TOOL["PARTS"][part]().items():
        assert path.read_text() == text, f"run tools/generate_chart.py {part}"


def test_every_value_has_a_comment(tmp_path: Path) -> None:
    command = (kube_binary("helm-docs"), "--chart-search-root", str(CHART), "--dry-run")
    strict = (
        "--documentation-strict-mode",
        "--documentation-strict-ignore-absent-regex",
        r"pools\..*|.*\.(requests|limits)\..*",
    )
    result = subprocess.run([*command, *strict], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr[-2000:]


def test_the_chart_is_clean() -> None:
    assert "0 chart(s) failed" in run_tool("helm", "lint", "--strict", str(CHART))
