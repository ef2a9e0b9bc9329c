"""Write what options take from elsewhere, and what static types need of them: in services/options, `choices.py` and
`keywords.py`.

    python tools/write_options.py [--check]

A type checker and an editor know the keywords of `LLM(...)` by a TypedDict, which can't be computed. Choices that are
modules or classes of the engine, which options know nothing of, are found there.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

from pagestream_engine import attention
from pagestream_engine.kv_cache.block_pool import EVICTION_ORDERS
from pagestream_options.declaration import Option
from pagestream_options.engine import ENGINE_OPTIONS

FOLDER = Path(__file__).resolve().parents[1] / "services/options/src/pagestream_options"
_HEAD = '''\
"""Keywords of the engine, for type checkers and editors. Written by `python tools/write_options.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict


class EngineOptions(TypedDict, total=False):
    """The flat option names, which are vLLM's; see the groups of `engine.py` for their meaning."""

'''
_CHOICES = '''\
"""Choices that modules of the engine declare. Written by `python tools/write_options.py`."""

'''


def choices() -> str:
    """Return the text of `choices.py`."""
    names = (each.name for each in iter_modules(attention.__path__))
    backends = [name for name in names if hasattr(import_module(f"{attention.__name__}.{name}"), "make_backend")]
    return _CHOICES + _names("ATTENTION_BACKENDS", "auto", *backends) + _names("EVICTION_POLICIES", *EVICTION_ORDERS)


def _names(constant: str, *names: str) -> str:
    return f"{constant} = ({', '.join(f'{chr(34)}{name}{chr(34)}' for name in names)})\n"


def keywords() -> str:
    """Return the text of `keywords.py`."""
    return _HEAD + "\n".join(_fields()) + "\n"


def _fields() -> Iterator[str]:
    for name, each in ENGINE_OPTIONS.items():
        yield f"    {name}: {_type(each)}"


def _type(each: Option) -> str:
    kind = each.kind.__name__ if isinstance(each.kind, type) else "Sequence[str]"
    return f"{kind} | None" if each.is_optional else kind


def main() -> int:
    """Write the modules, or with --check return 1 where one is not what it would be."""
    texts = {FOLDER / "choices.py": choices(), FOLDER / "keywords.py": keywords()}
    if "--check" in sys.argv[1:]:
        return int(any(not file.is_file() or file.read_text() != text for file, text in texts.items()))
    for file, text in texts.items():
        file.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
