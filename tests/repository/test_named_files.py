"""Every file, and every name in it, that a page of documentation names exists, and every link between pages leads
somewhere."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FILES = [
    path.relative_to(ROOT).as_posix()
    for folder in sorted(ROOT.iterdir())
    if not folder.name.startswith(".")
    for path in ([folder] if folder.is_file() else sorted(folder.rglob("*")))
    if path.is_file()
    and not any(part.startswith(".") or part == "__pycache__" for part in path.relative_to(ROOT).parts)
]
PAGES = [name for name in FILES if name.endswith(".md")]
ENDS = {name[place:] for name in FILES for place, before in enumerate("/" + name) if before == "/"}
"""All files, by their whole path and by each end of it that begins with a folder or file."""
NAMED = re.compile(r"`((?:[\w.*-]+/)+[\w*-]+\.(?:py|lua|cpp|proto|sh|toml|yaml|md|Dockerfile))(?:::?\w+)?`")
DEFINED = re.compile(r"`((?:[\w.-]+/)+[\w-]+\.(?:py|lua))::(\w+)`")
LINK = re.compile(r"\]\(((?!https?:|#|mailto:)[^)\s]+)\)")


def exists(named: str) -> bool:
    """Whether `named` is a file, or the end of one's path; `*` stands for any part of a name."""
    if "*" not in named:
        return named in ENDS
    pattern = re.compile(re.escape(named).replace(r"\*", "[^/]*"))
    return any(pattern.fullmatch(end) for end in ENDS)


def test_named_files_exist_and_links_lead_somewhere() -> None:
    wrong = []
    for page in PAGES:
        text = (ROOT / page).read_text()
        named = dict.fromkeys(NAMED.findall(text))
        wrong += [f"{page} names {each}" for each in named if not exists(each)]
        targets = {link.partition("#")[0] for link in LINK.findall(text)} - {""}
        wrong += [f"{page} links to {each}" for each in targets if not (ROOT / page).parent.joinpath(each).exists()]
    assert PAGES
    assert wrong == []


def test_names_are_defined_in_the_files_that_pages_say() -> None:
    wrong = []
    for page in PAGES:
        for named, name in dict.fromkeys(DEFINED.findall((ROOT / page).read_text())):
            texts = [(ROOT / file).read_text() for file in FILES if f"/{file}".endswith(f"/{named}")]
            defined = re.compile(rf"^\s*(?:async def|def|class|local function) {name}\b|^{name}\b.* =", re.MULTILINE)
            if not any(defined.search(text) for text in texts):
                wrong.append(f"{page} names {name} of {named}")
    assert wrong == []


FIRST_CELL = re.compile(r"^\| ((?:`[\w/]+(?:/|\.py)`(?:, )?)+) \|", re.MULTILINE)


def test_overviews_of_packages_name_files_and_folders_that_are_there() -> None:
    wrong = []
    for page in (each for each in PAGES if each.startswith(("services/", "operator/")) and each.endswith("README.md")):
        for cell in FIRST_CELL.findall((ROOT / page).read_text()):
            named = [each.rstrip("/") for each in re.findall(r"`([^`]+)`", cell)]
            inside = [f"/{file}" for file in FILES if file.startswith((page.removesuffix("README.md"), "tests/"))]
            missing = [each for each in named if not any(f"/{each}/" in f"{file}/" for file in inside)]
            wrong += [f"{page} names {each}" for each in missing]
    assert wrong == []
