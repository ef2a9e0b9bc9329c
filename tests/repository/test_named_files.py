"""Every file that a page of documentation names exists, and every link between pages leads somewhere."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
FILES = [
    path.relative_to(ROOT).as_posix()
    for folder in sorted(ROOT.iterdir())
    if not folder.name.startswith(".")
    for path in ([folder] if folder.is_file() else sorted(folder.rglob("*")))
    if path.is_file()
    and not any(part.startswith(".") or part == "__pycache__" for part in path.relative_to(ROOT).parts)
]
PAGES = [name for name in FILES if name.endswith(".md") and not name.endswith("0000-template.md")]
NAMED = re.compile(r"`((?:[\w.*-]+/)+[\w*-]+\.(?:py|lua|cpp|proto|sh|toml|yaml|md|Dockerfile))(?:::?\w+)?`")
LINK = re.compile(r"\]\(((?!https?:|#|mailto:)[^)\s]+)\)")


def exists(named: str) -> bool:
    """Whether `named` is a file, or the end of one's path; `*` stands for any part of a name."""
    pattern = re.compile(r"(?:.*/)?" + re.escape(named).replace(r"\*", "[^/]*"))
    return any(pattern.fullmatch(path) for path in FILES)


@pytest.mark.parametrize("page", PAGES)
def test_named_files_exist(page: str) -> None:
    text = (ROOT / page).read_text()
    assert [named for named in dict.fromkeys(NAMED.findall(text)) if not exists(named)] == []


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text()
    targets = [link.partition("#")[0] for link in LINK.findall(text)]
    assert [each for each in targets if each and not (ROOT / page).parent.joinpath(each).exists()] == []
