"""The choice between logs in C++ and logs in Python: the same bytes either way."""

from pagestream_worker.logs.base import TokenLogs
from pagestream_worker.logs.divided_logs import DividedLogs
from pagestream_worker.logs.library import load_library
from pagestream_worker.logs.native_logs import NativeLogs
from pagestream_worker.logs.python_logs import PythonLogs


def open_logs(limit_bytes: int) -> TokenLogs:
    """Return logs whose packed entries take at most `limit_bytes`; all in Python where C++ can't be compiled here."""
    library = load_library()
    return PythonLogs(limit_bytes) if library is None else DividedLogs(NativeLogs(library, limit_bytes), limit_bytes)
