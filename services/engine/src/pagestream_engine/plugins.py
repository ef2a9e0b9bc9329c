"""Modules of the user's that an engine imports first: they register scheduling policies and model families."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

from pagestream_engine.errors import ConfigError

_HINT = "install its package, or name its folder in PYTHONPATH"


def import_plugins(names: Sequence[str]) -> None:
    """Import modules, in order. One that this process has imported already is left as it is.

    Args:
        names: `ExtensionConfig.plugins`.

    Raises:
        ConfigError: there is no such module, or its import fails. One that exits the program (a script whose last line
            is not guarded by `if __name__ == "__main__"`) fails too: an engine would end without a word.
    """
    for name in names:
        try:
            import_module(name)
        except (Exception, SystemExit) as error:
            if isinstance(error, ModuleNotFoundError) and _is_part_of(name, error.name):
                raise ConfigError("plugins", name, "a module on Python's path", _HINT) from error
            what = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise ConfigError("plugins", name, f"a module that can be imported, not {what}") from error


def _is_part_of(name: str, missing: str | None) -> bool:
    """Whether the missing module is the named one or a package around it, and not one that it imports."""
    return missing is not None and f"{name}.".startswith(f"{missing}.")
