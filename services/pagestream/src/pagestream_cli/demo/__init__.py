"""`pagestream demo`: streams of a deployment on this machine, whose processes are killed meanwhile.

Names are imported when they are used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pagestream_cli.demo.report import as_json, is_identical, table, verdict
    from pagestream_cli.demo.streams import DemoStream, Kill, Timeline, fraction_read, new_streams

__all__ = [
    "DemoStream",
    "Kill",
    "Timeline",
    "as_json",
    "fraction_read",
    "is_identical",
    "new_streams",
    "table",
    "verdict",
]

_MODULES = {
    **dict.fromkeys(("as_json", "is_identical", "table", "verdict"), "report"),
    **dict.fromkeys(("DemoStream", "Kill", "Timeline", "fraction_read", "new_streams"), "streams"),
}
"""The module that defines each exported name."""


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
