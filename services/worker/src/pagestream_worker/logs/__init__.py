"""The logs of the claimed requests: entries that Redis lacks, or may ask for again; in C++ where it can be compiled.

Names are imported when they are used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pagestream_worker.logs.base import PACKED_ENTRIES, PendingLogs, TokenLog, TokenLogs
    from pagestream_worker.logs.divided_logs import DividedLogs
    from pagestream_worker.logs.library import load_library
    from pagestream_worker.logs.native_logs import NativeLog, NativeLogError, NativeLogs
    from pagestream_worker.logs.opening import open_logs
    from pagestream_worker.logs.python_logs import PythonLog, PythonLogs
    from pagestream_worker.logs.token_columns import NO_TOKENS, PlainSequences, TokenColumns

__all__ = [
    "NO_TOKENS",
    "PACKED_ENTRIES",
    "DividedLogs",
    "NativeLog",
    "NativeLogError",
    "NativeLogs",
    "PendingLogs",
    "PlainSequences",
    "PythonLog",
    "PythonLogs",
    "TokenColumns",
    "TokenLog",
    "TokenLogs",
    "load_library",
    "open_logs",
]

_MODULES = {
    **dict.fromkeys(("PACKED_ENTRIES", "PendingLogs", "TokenLog", "TokenLogs"), "base"),
    "DividedLogs": "divided_logs",
    "load_library": "library",
    **dict.fromkeys(("NativeLog", "NativeLogError", "NativeLogs"), "native_logs"),
    "open_logs": "opening",
    **dict.fromkeys(("PythonLog", "PythonLogs"), "python_logs"),
    **dict.fromkeys(("NO_TOKENS", "PlainSequences", "TokenColumns"), "token_columns"),
}
"""The module that defines each exported name."""


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
