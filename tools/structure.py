"""Measures the packages' structure: rooms, import arrows, floors, circles, sizes of folders, classes and modules.

A room is a sub-package or a module at a package's first level. An arrow is an import from one room to another; imports
for type checkers count. Floors are the rooms of the longest chain of arrows. A class may have more methods than the
limit if its docstring has a line `Methods: <reason>`.

    .venv/bin/python tools/structure.py                 # a Markdown table
    .venv/bin/python tools/structure.py --check         # exit 1 with a list if a limit is exceeded
    .venv/bin/python tools/structure.py --root DIR      # of another checkout
    .venv/bin/python tools/structure.py --draw FILE.svg [--package NAME]
"""

from __future__ import annotations

import argparse
import ast
import statistics
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parent.parent
MAX_FOLDER_MODULES = 15
MAX_CLASS_METHODS = 20
SMALL_LINES = 40
REASON = "Methods: "
_UNCOUNTED = ("__init__", "__main__")

Arrows = Mapping[str, frozenset[str]]


@dataclass(frozen=True, order=True)
class Size:
    """Something with its size; the largest sorts last."""

    count: int
    name: str

    def __str__(self) -> str:
        return f"{self.name} {self.count}"


@dataclass(frozen=True)
class Package:
    """One package's measures. Names of modules, folders and classes are relative to the package."""

    name: str
    imports: Arrows
    """Modules, and those of the same package that each imports."""
    modules: Sequence[Size]
    """Lines of each module but `__init__`."""
    folders: Sequence[Size]
    """Modules of each folder, without `__init__` and `__main__`."""
    classes: Sequence[Size]
    """Methods of each class without a written reason."""

    @property
    def rooms(self) -> Arrows:
        """Rooms, and those that each imports."""
        found: dict[str, set[str]] = {_room(name): set() for name in self.imports if name}
        for name, imported in self.imports.items():
            if name:
                found[_room(name)] |= {_room(other) for other in imported if other} - {_room(name)}
        return {room: frozenset(imported) for room, imported in found.items()}

    @property
    def num_arrows(self) -> int:
        """Import arrows between rooms."""
        return sum(map(len, self.rooms.values()))

    @property
    def module_circles(self) -> list[list[str]]:
        """Groups of modules that import each other, directly or through others."""
        return circles(self.imports)

    @property
    def room_circles(self) -> list[list[str]]:
        """Groups of rooms that import each other, directly or through others."""
        return circles(self.rooms)


def find_packages(root: Path) -> dict[str, Path]:
    """Return the folders of the packages below `*/src` and `services/*/src` by name, without namespace packages."""
    inits = [*root.glob("*/src/*/__init__.py"), *root.glob("services/*/src/*/__init__.py")]
    return {init.parent.name: init.parent for init in sorted(inits)}


def measure(name: str, folder: Path) -> Package:
    """Measure the package `name` in `folder`."""
    sources = sorted(path for path in folder.rglob("*.py") if "_pb2" not in path.stem)
    classes = [each for path in sources for each in _classes(path, _relative(path, folder))]
    return Package(
        name,
        _imports(name, folder),
        sorted(
            Size(len(path.read_text().splitlines()), _relative(path, folder))
            for path in sources
            if path.stem != "__init__"
        ),
        sorted(_folders(sources, folder)),
        sorted(classes),
    )


def circles(arrows: Arrows) -> list[list[str]]:
    """Return the strongly connected components with more than one member, sorted."""
    reached = {name: _reachable(name, arrows) for name in arrows}
    groups = {frozenset({name, *(o for o in reached[name] if name in reached[o])}) for name in arrows}
    return sorted(sorted(group) for group in groups if len(group) > 1)


def floors(arrows: Arrows) -> dict[str, int]:
    """Return each node's floor: 0 imports nothing, others are one above the highest that they import.

    The members of a circle share a floor.
    """
    reached = {name: _reachable(name, arrows) for name in arrows}
    found: dict[str, int] = {}
    for name in sorted(arrows, key=lambda each: (len(reached[each] | {each}), each)):
        circle = {other for other in reached[name] if name in reached[other]} | {name}
        below = {other for member in circle for other in arrows[member]} - circle
        floor = max((found[other] + 1 for other in below), default=0)
        found |= dict.fromkeys(circle, floor)
    return found


def problems(package: Package) -> Iterator[str]:
    """Yield a line for each limit that a package exceeds."""
    for folder in package.folders:
        if folder.count > MAX_FOLDER_MODULES:
            where = package.name if folder.name == "." else f"{package.name}/{folder.name}"
            yield f"{where}: {folder.count} modules in a folder, at most {MAX_FOLDER_MODULES} are expected"
    for each in package.classes:
        if each.count > MAX_CLASS_METHODS:
            yield (
                f"{package.name}.{each.name}: {each.count} methods, at most {MAX_CLASS_METHODS} are expected; "
                f"split the class, or give the reason in its docstring in a line `{REASON}<reason>`"
            )
    for circle in package.module_circles:
        yield f"{package.name}: modules import each other: {', '.join(name or '__init__' for name in circle)}"
    for circle in package.room_circles:
        yield f"{package.name}: rooms import each other: {', '.join(circle)}"


def table(packages: Iterable[Package]) -> Iterator[str]:
    """Yield a Markdown table with a row for each package."""
    yield (
        "| package | rooms | arrows | floors | circles (modules, rooms) | modules | largest folder | largest class "
        f"| largest module | median | under {SMALL_LINES} lines |"
    )
    yield "|---|" + 10 * "---|"
    for package in packages:
        lines = [module.count for module in package.modules] or [0]
        cells = (
            package.name,
            len(package.rooms),
            package.num_arrows,
            max(floors(package.rooms).values(), default=-1) + 1,
            f"{len(package.module_circles)}, {len(package.room_circles)}",
            len(package.modules),
            max(package.folders, default="-"),
            max(package.classes, default="-"),
            max(package.modules, default="-"),
            f"{statistics.median(lines):.0f}",
            sum(count < SMALL_LINES for count in lines),
        )
        yield f"| {' | '.join(map(str, cells))} |"


def _imports(name: str, folder: Path) -> Arrows:
    sys.path.insert(0, str(folder.parent))
    try:
        graph = grimp.build_graph(name, cache_dir=None)
    finally:
        sys.path.remove(str(folder.parent))
    modules = {module for module in graph.modules if "_pb2" not in module}
    return {
        _inside(module): frozenset(_inside(other) for other in graph.find_modules_directly_imported_by(module))
        for module in modules
    }


def _inside(module: str) -> str:
    """Return a module's name relative to its package; "" for the package itself."""
    return module.partition(".")[2]


def _room(module: str) -> str:
    return module.partition(".")[0]


def _relative(path: Path, folder: Path) -> str:
    parts = path.relative_to(folder).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _folders(sources: Sequence[Path], folder: Path) -> Iterator[Size]:
    for parent in {path.parent for path in sources}:
        counted = [path for path in sources if path.parent == parent and path.stem not in _UNCOUNTED]
        yield Size(len(counted), parent.relative_to(folder).as_posix())


def _classes(path: Path, module: str) -> Iterator[Size]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ClassDef) and not _has_reason(node):
            methods = {each.name for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)}
            yield Size(len(methods), f"{module}.{node.name}".removeprefix("."))


def _has_reason(node: ast.ClassDef) -> bool:
    lines = (ast.get_docstring(node) or "").splitlines()
    return any(line.startswith(REASON) and line.removeprefix(REASON).strip() for line in lines)


def _reachable(start: str, arrows: Arrows) -> frozenset[str]:
    """Return the nodes that `start` reaches by one arrow or more."""
    found: set[str] = set()
    waiting = [start]
    while waiting:
        fresh = arrows[waiting.pop()] - found
        found |= fresh
        waiting += fresh
    return frozenset(found)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table, or check the limits. Returns 1 if one is exceeded."""
    parser = argparse.ArgumentParser(description="Measures the packages' structure.")
    parser.add_argument("--check", action="store_true", help="list what exceeds a limit; exit 1 if anything does")
    parser.add_argument(
        "--root", type=Path, default=ROOT, metavar="DIR", help="checkout to measure (default: this one)"
    )
    parser.add_argument("--package", metavar="NAME", help="one package only")
    parser.add_argument("--draw", type=Path, metavar="FILE", help="write an SVG of the rooms")
    given = parser.parse_args(arguments)
    found = find_packages(given.root.resolve())
    if given.package is not None:
        if given.package not in found:
            parser.error(f"--package {given.package}: one of {', '.join(found)} is expected")
        found = {given.package: found[given.package]}
    if not found:
        parser.error(f"--root {given.root}: no package at */src/* or services/*/src/*")
    packages = [measure(name, folder) for name, folder in found.items()]
    if given.draw is not None:
        from structure_drawing import draw

        given.draw.write_text(draw({package.name: package.rooms for package in packages}))
    if given.check:
        exceeded = [line for package in packages for line in problems(package)]
        for line in exceeded:
            print(line, file=sys.stderr)
        return int(bool(exceeded))
    if given.draw is None:
        print("\n".join(table(packages)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
