"""What an engine gives up, rung by rung, while blocks, host memory or Redis' memory are short.

Names are imported when they are used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pagestream_worker.ladder.effects import BatchLimit, Effects, Ladders, Rungs, effects_at
    from pagestream_worker.ladder.host_memory import host_share
    from pagestream_worker.ladder.ladder import BETWEEN_MARKS, TOP, Ladder, Pace, Resource, Rung, Shares, Watermarks
    from pagestream_worker.ladder.settings import DegradationSettings, degradation_settings

__all__ = [
    "BETWEEN_MARKS",
    "TOP",
    "BatchLimit",
    "DegradationSettings",
    "Effects",
    "Ladder",
    "Ladders",
    "Pace",
    "Resource",
    "Rung",
    "Rungs",
    "Shares",
    "Watermarks",
    "degradation_settings",
    "effects_at",
    "host_share",
]

_MODULES = {
    **dict.fromkeys(("BatchLimit", "Effects", "Ladders", "Rungs", "effects_at"), "effects"),
    "host_share": "host_memory",
    **dict.fromkeys(("BETWEEN_MARKS", "TOP", "Ladder", "Pace", "Resource", "Rung", "Shares", "Watermarks"), "ladder"),
    **dict.fromkeys(("DegradationSettings", "degradation_settings"), "settings"),
}
"""The module that defines each exported name."""


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
