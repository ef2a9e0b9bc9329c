"""Compare the prompts of published chat templates with those of `transformers`, shape by shape.

    pip download --no-deps --no-binary :all: llama-cpp-python==0.3.36
    tar xzf llama_cpp_python-*.tar.gz --wildcards '*/models/templates/*.jinja'
    PYTHONPATH=tests python tests/campaigns/template_matrix.py llama_cpp_python-*/vendor/llama.cpp/models/templates

Writes the table of docs/chat-templates.md. It ends with exit code 1 where `transformers` has a prompt with all that was
said and ours has not.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from support.protocol.template_shapes import SHAPES, TOKENS, compared, has_all

PAGE = Path(__file__).resolve().parents[2] / "docs" / "chat-templates.md"
BEGIN, END = "<!-- template_matrix.py -->\n", "<!-- end of template_matrix.py -->"
_NAME_CHARACTERS = 50


def row_of(file: Path) -> tuple[list[str], list[str]]:
    """Return the cells of a template, and the shapes that only `transformers` shows whole."""
    cells, lost = [], []
    for name, cell in compared(file.read_text(encoding="utf-8"), TOKENS).items():
        cells.append(cell.verdict(SHAPES[name]))
        if cell.others and not has_all(cell.ours, SHAPES[name]):
            lost.append(name)
    return cells, lost


def main(arguments: list[str] | None = None) -> int:
    """Write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="with *.jinja")
    files = sorted(parser.parse_args(arguments).folder.glob("*.jinja"), key=lambda file: file.stem.lower())
    lines = [f"| template | {' | '.join(str(number) for number, _ in enumerate(SHAPES, 1))} |"]
    lines.append(f"|---{'|---' * len(SHAPES)}|")
    all_lost = []
    for file in files:
        cells, lost = row_of(file)
        lines.append(f"| {file.stem[:_NAME_CHARACTERS]} | {' | '.join(cells)} |")
        all_lost += [f"{file.stem}: {each}" for each in lost]
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    table = "\n".join(lines)
    PAGE.write_text(f"{before}{BEGIN}\n{table}\n\n{END}{after}", encoding="utf-8")
    for each in all_lost:
        sys.stderr.write(f"only transformers shows all of {each}\n")
    return 1 if all_lost else 0


if __name__ == "__main__":
    sys.exit(main())
