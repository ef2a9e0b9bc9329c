"""tools/prose.py on a small checkout."""

import subprocess
from pathlib import Path
from types import ModuleType

import pytest

TOOLS = Path(__file__).resolve().parents[3] / "tools"
URL = "https://example.org/" + "a" * 120


@pytest.fixture
def prose(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(TOOLS)
    import prose

    return prose


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    return tmp_path


def add(checkout: Path, name: str, text: str) -> None:
    path = checkout / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    subprocess.run(["git", "-C", str(checkout), "add", name], check=True)


@pytest.mark.parametrize("name", ["a.md", "b/c.lua", "d.yaml", "e.yml"])
def test_a_line_of_121_columns_is_listed_with_its_number(prose: ModuleType, checkout: Path, name: str) -> None:
    add(checkout, name, f"{'x' * 120}\n{'x' * 121}\n")
    assert list(prose.problems(checkout)) == [f"{name}:2: 121 columns, at most 120 are expected"]


@pytest.mark.parametrize(
    "line",
    [
        URL,
        f"<{URL}>",
        f"[text]({URL})",
        f"- [text]({URL})",
        f"[label]: {URL}",
        f"| a cell | [text]({URL}) |",
    ],
)
def test_a_line_may_be_long_by_its_url(prose: ModuleType, line: str) -> None:
    assert len(line) > 120
    assert list(prose.long_lines(line, is_markdown=True)) == []
    assert list(prose.long_lines(line, is_markdown=False)) == [(1, len(line))]


@pytest.mark.parametrize("line", [f"See [text]({URL}) for more.", f"| {'word ' * 30}| {URL} |", f"| {'word ' * 30}|"])
def test_a_sentence_or_a_cell_may_not_be_long(prose: ModuleType, line: str) -> None:
    assert list(prose.long_lines(line, is_markdown=True)) == [(1, len(line))]


def test_columns_are_characters_and_not_bytes(prose: ModuleType) -> None:
    assert list(prose.long_lines("é" * 120, is_markdown=True)) == []


@pytest.mark.parametrize(
    "name", ["helm/pagestream/crds/enginepools.yaml", "tests/integration/chart/golden/gateway.yaml", "data.json"]
)
def test_generated_files_and_other_formats_are_not_read(prose: ModuleType, checkout: Path, name: str) -> None:
    add(checkout, name, "x" * 200)
    assert list(prose.problems(checkout)) == []


def test_the_rows_of_a_generated_table_are_not_checked(prose: ModuleType, checkout: Path) -> None:
    add(checkout, "helm/pagestream/README.md", f"{'x' * 200}\n| {'x' * 200} |\n")
    assert list(prose.problems(checkout)) == ["helm/pagestream/README.md:1: 200 columns, at most 120 are expected"]


def test_untracked_and_deleted_files_are_not_read(prose: ModuleType, checkout: Path) -> None:
    (checkout / "untracked.md").write_text("x" * 200)
    add(checkout, "deleted.md", "x" * 200)
    (checkout / "deleted.md").unlink()
    assert list(prose.problems(checkout)) == []


def test_only_check_fails(prose: ModuleType, checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    add(checkout, "a.md", "x" * 200)
    assert prose.main(["--root", str(checkout)]) == 0
    assert prose.main(["--root", str(checkout), "--check"]) == 1
    assert "a.md:1" in capsys.readouterr().err
