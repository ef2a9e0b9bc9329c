"""Every test that a page of documentation names exists."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def test_named_tests_exist() -> None:
    pages = [*(ROOT / "docs").glob("*.md"), ROOT / "CONTRIBUTING.md"]
    named = [(page.name, *found) for page in pages for found in NAMED.findall(page.read_text())]
    assert {page for page, _, _ in named} >= {"security.md"}
    wrong = []
    for page, file, name in named:
        path = ROOT / file
        if not path.is_file() or not re.search(rf"^(?:async )?def {name}\(", path.read_text(), re.MULTILINE):
            wrong.append(f"{page} names {file}::{name}")
    assert wrong == []
