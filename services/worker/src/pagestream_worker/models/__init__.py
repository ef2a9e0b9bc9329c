"""One engine process, several models: which it serves, and how it changes from one to another.

Names are imported when they are used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pagestream_worker.models.cores import Cores
    from pagestream_worker.models.failures import FIRST_DELAY_S, MOST_DELAY_S, Failures
    from pagestream_worker.models.loader import EngineStuckError, Loader, LoadTimeoutError
    from pagestream_worker.models.orders import Duties, read_duties
    from pagestream_worker.models.sharing import Change, Demand, EngineState, SharingLimits, plan_changes
    from pagestream_worker.models.turns import Turns

__all__ = [
    "FIRST_DELAY_S",
    "MOST_DELAY_S",
    "Change",
    "Cores",
    "Demand",
    "Duties",
    "EngineState",
    "EngineStuckError",
    "Failures",
    "LoadTimeoutError",
    "Loader",
    "SharingLimits",
    "Turns",
    "plan_changes",
    "read_duties",
]

_MODULES = {
    "Cores": "cores",
    **dict.fromkeys(("FIRST_DELAY_S", "MOST_DELAY_S", "Failures"), "failures"),
    **dict.fromkeys(("EngineStuckError", "LoadTimeoutError", "Loader"), "loader"),
    **dict.fromkeys(("Duties", "read_duties"), "orders"),
    **dict.fromkeys(("Change", "Demand", "EngineState", "SharingLimits", "plan_changes"), "sharing"),
    "Turns": "turns",
}
"""The module that defines each exported name."""


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
