"""`pagestream replay`: a past request, generated again.

Names are imported when they are used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pagestream_cli.replay.answers import Answer, read_log
    from pagestream_cli.replay.comparison import first_difference, largest_gap
    from pagestream_cli.replay.regeneration import bounded

__all__ = [
    "Answer",
    "bounded",
    "first_difference",
    "largest_gap",
    "read_log",
]

_MODULES = {
    **dict.fromkeys(("Answer", "read_log"), "answers"),
    **dict.fromkeys(("first_difference", "largest_gap"), "comparison"),
    "bounded": "regeneration",
}
"""The module that defines each exported name."""


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
