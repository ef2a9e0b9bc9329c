"""Pages of documentation that are written from the code are as they would be written now."""

import runpy
from pathlib import Path

import pytest

pytestmark = pytest.mark.served

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("tool", ["write_fields.py", "write_sizing.py", "write_vllm_flags.py", "write_reference.py"])
def test_a_page_has_the_contents_of_now(tool: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("sys.argv", [tool, "--check"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "tools" / tool), run_name="__main__")
    assert not ended.value.code, f"run: python tools/{tool}"
