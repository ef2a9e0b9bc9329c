"""Count a package's floors of imports: the longest chain of its parts in which each imports the next one.

    .venv/bin/python tools/floors.py [PACKAGE]    # pagestream_engine

A part is a folder or a module at the package's first level. Imports for type checkers alone don't count. Parts that
import each other, in a circle, share a floor, which hides a chain within it: they are printed in parentheses.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

import grimp


def parts_of(package: str) -> dict[str, set[str]]:
    """Return the parts of an installed package, and the other parts that each imports."""
    graph = grimp.build_graph(package, cache_dir=None, exclude_type_checking_imports=True)
    inside = {module: module.split(".")[1] for module in graph.modules if "." in module}
    arrows: dict[str, set[str]] = {part: set() for part in inside.values()}
    for module, part in inside.items():
        imported = {inside[other] for other in graph.find_modules_directly_imported_by(module) if other in inside}
        arrows[part] |= imported - {part}
    return arrows


def floors_of(arrows: Mapping[str, set[str]]) -> list[list[str]]:
    """Return the parts of each floor, the lowest first: those that import nothing, then those one above the highest
    that they import."""
    reached = {part: _reached(part, arrows) for part in arrows}
    found: dict[str, int] = {}
    for part in sorted(arrows, key=lambda each: (len(reached[each] | {each}), each)):
        circle = {other for other in reached[part] if part in reached[other]} | {part}
        below = {other for member in circle for other in arrows[member]} - circle
        found |= dict.fromkeys(circle, max((found[other] + 1 for other in below), default=0))
    return [sorted(part for part in found if found[part] == floor) for floor in range(max(found.values()) + 1)]


def _reached(part: str, arrows: Mapping[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    waiting = [part]
    while waiting:
        new = arrows[waiting.pop()] - seen
        seen |= new
        waiting += new
    return seen


def main() -> None:
    """Print the floors, the highest first."""
    package = sys.argv[1] if len(sys.argv) > 1 else "pagestream_engine"
    arrows = parts_of(package)
    floors = floors_of(arrows)
    print(f"{package}: {len(floors)} floors")
    for number, parts in reversed(list(enumerate(floors, 1))):
        shown = (f"({part})" if part in _reached(part, arrows) else part for part in parts)
        print(f"{number:3}  {', '.join(shown)}")


if __name__ == "__main__":
    main()
