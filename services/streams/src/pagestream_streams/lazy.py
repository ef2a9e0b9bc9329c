"""Names of a package that are imported when they are used."""

from collections.abc import Callable, Collection, Sequence
from importlib import import_module


def lazily(package: str, names: Collection[str], modules: Sequence[str]) -> Callable[[str], object]:
    """Return the `__getattr__` of a package that exports these names of its modules.

    Modules are looked through in the given order: those that load little come first.
    """

    def find(name: str) -> object:
        if name in modules:
            return import_module(f"{package}.{name}")
        if name in names:
            for each in modules:
                module = import_module(f"{package}.{each}")
                if hasattr(module, name):
                    return getattr(module, name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return find
