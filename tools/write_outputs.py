"""Write the table of docs/outputs.md: how models write calls of tools.

python tools/write_outputs.py [--check]
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from pagestream_grammars.output_formats.registry import TOOL_FORMATS

PAGE = Path(__file__).resolve().parents[1] / "docs" / "outputs.md"
BEGIN, END = "<!-- formats of tool calls -->", "<!-- end of formats -->"


def table() -> str:
    """Return a row for each spelling of each format, and the authorities below."""
    rows: list[str] = []
    authorities: list[str] = []
    for each in TOOL_FORMATS.values():
        parsers, *others = [", ".join(f"`{name}`" for name in pair) for pair in _pairs(each.parsers)]
        for spelling in each.spellings:
            authorities.append(f"[{len(authorities) + 1}] {spelling.authority}")
            looks = spelling.looks.replace("|", "\\|")
            rows.append(f"| {parsers} | {spelling.models} | {looks} | [{len(authorities)}] |")
        rows += [f"| {names} | likewise | likewise | |" for names in others]
    text = f"Authorities, vLLM's unless another is named: {'; '.join(authorities)}."
    head = ["| `--tool-call-parser` | models | what calls look like | authority |", "|---|---|---|---|"]
    return "\n".join([*head, *rows, "", *textwrap.wrap(text, 118, break_on_hyphens=False)])


def _pairs(names: Sequence[str]) -> list[Sequence[str]]:
    return [names[place : place + 2] for place in range(0, len(names), 2)]


def page(text: str) -> str:
    """Return the page with the table of now."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}"


def main() -> int:
    """Write the page, or tell whether it is what would be written."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 unless the page is as it should be")
    old = PAGE.read_text()
    new = page(old)
    if parser.parse_args().check:
        return int(new != old)
    PAGE.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
