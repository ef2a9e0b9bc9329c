"""Checks that lines of Markdown, Lua and YAML end before column 120: `tools/prose.py --check`.

Tracked files are read, without generated ones. A Markdown line that is longer because of its URLs is allowed if it is
nothing but a link, or a row of a table.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MAX_COLUMNS = 120
PATTERNS = ("*.md", "*.lua", "*.yaml", "*.yml")
GENERATED = (
    "helm/pagestream/crds/*",
    "operator/src/pagestream_operator/crd/*",
    "tests/**/golden/*",
)
GENERATED_TABLES = frozenset({"helm/pagestream/README.md"})
"""Files whose tables are generated: their rows are not checked."""
_URL = re.compile(r"https?://[^\s)|>]+")
_ONLY_LINK = re.compile(r"^\s*(?:[-*]\s+|\d+\.\s+)?(?:\[[^\]]*\]:?\s*\(?<?\S+>?\)?|<?https?://\S+>?)[.,;]?\s*$")


def tracked_files(root: Path) -> list[str]:
    """Return the tracked files to check, relative to `root`."""
    command = ["git", "-C", str(root), "ls-files", "-z", "--", *PATTERNS]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split("\0")
    return [name for name in listed if name and not any(fnmatch(name, pattern) for pattern in GENERATED)]


def long_lines(text: str, *, is_markdown: bool) -> Iterator[tuple[int, int]]:
    """Yield the number, from 1, and the length of each line that is too long."""
    for number, line in enumerate(text.splitlines(), start=1):
        if len(line) > MAX_COLUMNS and not (is_markdown and _is_long_by_url(line)):
            yield number, len(line)


def _is_long_by_url(line: str) -> bool:
    if line.lstrip().startswith("|"):
        return len(_URL.sub("", line)) <= MAX_COLUMNS
    return _ONLY_LINK.match(line) is not None


def problems(root: Path) -> Iterator[str]:
    """Yield a line for each line that is too long."""
    for name in tracked_files(root):
        path = root / name
        if not path.is_file():  # deleted, and not committed yet
            continue
        text = path.read_text()
        if name in GENERATED_TABLES:
            text = "\n".join("" if line.startswith("|") else line for line in text.splitlines())
        for number, length in long_lines(text, is_markdown=path.suffix == ".md"):
            yield f"{name}:{number}: {length} columns, at most {MAX_COLUMNS} are expected"


def main(arguments: Sequence[str] | None = None) -> int:
    """List lines that are too long. Returns 1 with --check if there are any."""
    parser = argparse.ArgumentParser(description="Lists lines of Markdown, Lua and YAML over 120 columns.")
    parser.add_argument("--check", action="store_true", help="exit 1 if there are any")
    parser.add_argument("--root", type=Path, default=ROOT, metavar="DIR", help="checkout to read (default: this one)")
    given = parser.parse_args(arguments)
    found = list(problems(given.root.resolve()))
    for line in found:
        print(line, file=sys.stderr)
    return int(bool(found) and given.check)


if __name__ == "__main__":
    sys.exit(main())
