"""Child processes: kept running, restarted with a delay, and stopped in order.

Names are imported when they are used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pagestream_cli.supervisor.part import (
        Death,
        PartOutput,
        PartSpec,
        PartState,
        PartView,
        RestartPolicy,
        RestartRecord,
        Standby,
    )
    from pagestream_cli.supervisor.supervisor import Supervisor

__all__ = [
    "Death",
    "PartOutput",
    "PartSpec",
    "PartState",
    "PartView",
    "RestartPolicy",
    "RestartRecord",
    "Standby",
    "Supervisor",
]

_MODULES = {
    **dict.fromkeys(
        ("Death", "PartOutput", "PartSpec", "PartState", "PartView", "RestartPolicy", "RestartRecord", "Standby"),
        "part",
    ),
    "Supervisor": "supervisor",
}
"""The module that defines each exported name."""


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
