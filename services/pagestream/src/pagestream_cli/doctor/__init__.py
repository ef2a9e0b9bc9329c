"""`pagestream doctor`: what this machine has, what is wrong, and what to do.

Names are imported when they are used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pagestream_cli.doctor.finding import Finding, Verdict
    from pagestream_cli.doctor.place import check_context, check_data_dir, check_model, check_ports, check_serve
    from pagestream_cli.doctor.redis import check_running_redis
    from pagestream_cli.doctor.software import (
        check_compiler,
        check_logs,
        check_python,
        check_redis,
        check_torch,
        check_triton,
    )

__all__ = [
    "Finding",
    "Verdict",
    "check_compiler",
    "check_context",
    "check_data_dir",
    "check_logs",
    "check_model",
    "check_ports",
    "check_python",
    "check_redis",
    "check_running_redis",
    "check_serve",
    "check_torch",
    "check_triton",
]

_MODULES = {
    **dict.fromkeys(("Finding", "Verdict"), "finding"),
    **dict.fromkeys(("check_context", "check_data_dir", "check_model", "check_ports", "check_serve"), "place"),
    "check_running_redis": "redis",
    **dict.fromkeys(
        ("check_compiler", "check_logs", "check_python", "check_redis", "check_torch", "check_triton"), "software"
    ),
}
"""The module that defines each exported name."""


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
