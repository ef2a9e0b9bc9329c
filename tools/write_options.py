"""Write what static types need of the options: services/options/src/pagestream_options/keywords.py.

    python tools/write_options.py [--check]

A type checker and an editor know the keywords of `LLM(...)` by a TypedDict, which can't be computed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from pagestream_options.declaration import Option
from pagestream_options.engine import ENGINE_OPTIONS

PAGE = Path(__file__).resolve().parents[1] / "services/options/src/pagestream_options/keywords.py"
_HEAD = '''\
"""Keywords of the engine, for type checkers and editors. Written by `python tools/write_options.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict


class EngineOptions(TypedDict, total=False):
    """The flat option names, which are vLLM's; see the groups of `engine.py` for their meaning."""

'''


def module() -> str:
    """Return the module's text."""
    return _HEAD + "\n".join(_fields()) + "\n"


def _fields() -> Iterator[str]:
    for name, each in ENGINE_OPTIONS.items():
        yield f"    {name}: {_type(each)}"


def _type(each: Option) -> str:
    kind = each.kind.__name__ if isinstance(each.kind, type) else "Sequence[str]"
    return f"{kind} | None" if each.is_optional else kind


def main() -> int:
    """Write the module, or with --check return 1 where it is not what it would be."""
    if "--check" in sys.argv[1:]:
        return int(not PAGE.is_file() or PAGE.read_text() != module())
    PAGE.write_text(module())
    return 0


if __name__ == "__main__":
    sys.exit(main())
