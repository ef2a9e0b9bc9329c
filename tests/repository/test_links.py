"""Links of the pages, and the pages that code and settings name, lead somewhere, headings included."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from support.processes.stack import ROOT

NAMING = (".lua", ".md", ".proto", ".py", ".toml", ".tpl", ".yaml")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_NAMED = re.compile(r"\bdocs/[\w/-]+\.md(?:#[\w-]+)?")
_FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


@cache
def tracked() -> tuple[Path, ...]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    return tuple(path for name in listed.stdout.splitlines() if (path := ROOT / name).is_file())


@cache
def anchors(page: Path) -> frozenset[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    counts: Counter[str] = Counter()
    made: set[str] = set()
    for heading in re.findall(r"^#+ +(.*)$", _FENCED.sub("", page.read_text()), re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        anchor = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        made.add(f"{anchor}-{counts[anchor]}" if counts[anchor] else anchor)
        counts[anchor] += 1
    return frozenset(made)


def leads(start: Path, link: str) -> bool:
    name, _, anchor = link.partition("#")
    page = (start / name).resolve() if name else start
    return page.exists() and (not anchor or page.suffix != ".md" or anchor in anchors(page))


def dead() -> Iterator[str]:
    for path in tracked():
        if path.suffix not in NAMING:
            continue
        text = path.read_text()
        if path.suffix == ".md":
            for link in _LINK.findall(_FENCED.sub("", text)):
                is_own = link.startswith("#")
                if not re.match(r"[a-z]+:", link) and not leads(path if is_own else path.parent, link):
                    yield f"{path.relative_to(ROOT)}: {link}"
        else:
            for link in _NAMED.findall(text):
                if not leads(ROOT, link):
                    yield f"{path.relative_to(ROOT)}: {link}"


def test_links_lead_somewhere() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("no git checkout says which files are the project's")
    assert list(dead()) == []


def test_every_page_is_linked() -> None:
    """From another page: nobody would find it otherwise."""
    linked = {
        (path.parent / link.partition("#")[0]).resolve()
        for path in tracked()
        if path.suffix == ".md"
        for link in _LINK.findall(path.read_text())
        if not link.startswith("#")
    }
    pages = {path for path in tracked() if path.suffix == ".md" and path.is_relative_to(ROOT / "docs")}
    assert sorted(str(page.relative_to(ROOT)) for page in pages - linked) == []
