"""The pagestream command: serve, generate, chat, bench, replay, simulate, dead, doctor.

Names are imported when they are used, so that `--help` is quick.
"""

import sys

# A Ctrl-C while modules are imported ends the command, without a traceback of their code. Not where others import this.
if "".join(sys.argv[:1]).endswith(("/pagestream", "/pagestream_cli/__main__.py", "-m")):
    import _signal  # type: ignore[import-not-found]  # the interpreter's own: `signal` imports others

    if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
        _signal.signal(_signal.SIGINT, _signal.SIG_DFL)  # until `main` handles it

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pagestream_cli.datadir import (
        DataDir,
        DataDirLock,
        ProcessRecord,
        ServeRecord,
        default_data_dir,
        dial_host,
        read_record,
        write_record,
    )
    from pagestream_cli.errors import (
        CliError,
        DataDirBusyError,
        DataDirError,
        NotFoundError,
        PartFailedError,
        PortTakenError,
        ReplayFailedError,
        RequestRejectedError,
        ServeFileInvalidError,
        ServerNotFoundError,
        StreamLostError,
        UsageError,
    )

__all__ = [
    "CliError",
    "DataDir",
    "DataDirBusyError",
    "DataDirError",
    "DataDirLock",
    "NotFoundError",
    "PartFailedError",
    "PortTakenError",
    "ProcessRecord",
    "ReplayFailedError",
    "RequestRejectedError",
    "ServeFileInvalidError",
    "ServeRecord",
    "ServerNotFoundError",
    "StreamLostError",
    "UsageError",
    "default_data_dir",
    "dial_host",
    "read_record",
    "write_record",
]

_MODULES = {
    **dict.fromkeys(
        (
            "DataDir",
            "DataDirLock",
            "ProcessRecord",
            "ServeRecord",
            "default_data_dir",
            "dial_host",
            "read_record",
            "write_record",
        ),
        "datadir",
    ),
    **dict.fromkeys(
        (
            "CliError",
            "DataDirBusyError",
            "DataDirError",
            "NotFoundError",
            "PartFailedError",
            "PortTakenError",
            "ReplayFailedError",
            "RequestRejectedError",
            "ServeFileInvalidError",
            "ServerNotFoundError",
            "StreamLostError",
            "UsageError",
        ),
        "errors",
    ),
}
"""The module that defines each exported name."""


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
