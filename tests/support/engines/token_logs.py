"""The kinds of token logs, for tests that hold for all."""

from collections.abc import Callable

from pagestream_worker.logs import DividedLogs, NativeLogs, PythonLogs, TokenLogs, load_library


def divided_logs(limit_bytes: int) -> DividedLogs:
    """Return the logs of an engine: in C++ where all tokens are plain. Only where `load_library` has a library."""
    return DividedLogs(native_logs(limit_bytes), limit_bytes)


def native_logs(limit_bytes: int) -> NativeLogs:
    """Return the logs in C++. Only where `load_library` has a library."""
    library = load_library()
    if library is None:
        raise RuntimeError("the logs can't be compiled here")
    return NativeLogs(library, limit_bytes)


KINDS: list[Callable[[int], TokenLogs]] = [
    PythonLogs,
    *([native_logs, divided_logs] if load_library() is not None else []),
]
"""Each makes logs that hold at most so many bytes."""
