"""What each package exports: the names in `__all__` are there, are the package's own, and say what they are."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def packages() -> Iterator[tuple[str, Path]]:
    """Yield name and `__init__.py` of each package that has an `__all__`."""
    for pattern in ("*/src/*", "services/*/src/*"):
        for top in sorted(ROOT.glob(pattern)):
            for init in sorted(top.rglob("__init__.py")):
                if "__all__" in init.read_text(encoding="utf-8"):
                    yield ".".join(init.parent.relative_to(top.parent).parts), init


PACKAGES = dict(packages())


def imported_names(package: str, init: Path) -> set[str]:
    """Return the public names that an `__init__.py` imports from its own package, and doesn't use itself."""
    nodes = list(ast.walk(ast.parse(init.read_text(encoding="utf-8"))))
    imports = [
        node for node in nodes if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith(f"{package}.")
    ]
    names = {each.asname or each.name for node in imports for each in node.names}
    used = {node.id for node in nodes if isinstance(node, ast.Name)}
    return {name for name in names - used if not name.startswith("_")}


def test_every_product_has_a_door() -> None:
    tops = {name.partition(".")[0] for name in PACKAGES}
    products = {
        "cli",
        "client",
        "engine",
        "gateway",
        "kernels",
        "operator",
        "scaling",
        "simulator",
        "streams",
        "telemetry",
    }
    assert {f"pagestream_{each}" for each in products} <= tops


@pytest.mark.parametrize("package", PACKAGES)
def test_exported_names(package: str) -> None:
    module = import_module(package)
    names = module.__all__
    assert len(set(names)) == len(names), "a name is exported once"
    assert not [name for name in names if name.startswith("_")], "a private name is not exported"
    assert not imported_names(package, PACKAGES[package]) - set(names), "imported for users, and missing in __all__"
    for name in names:
        value = getattr(module, name)
        if inspect.isclass(value) or inspect.isroutine(value):
            assert value.__doc__, f"{name} has a docstring"
            owners = {package.partition(".")[0], "pagestream_options"}  # options and their errors are declared there
            assert value.__module__.partition(".")[0] in owners, f"{name} is the package's own"
    with pytest.raises(AttributeError, match="Enigne"):
        _ = module.Enigne
