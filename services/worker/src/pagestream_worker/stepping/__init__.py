"""The engine of a worker, in a process of its own or on a thread, and what is observed of its steps.

Names are imported when they are used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pagestream_worker.stepping.commands import AbortSequences, AddGroup, Command, StepMarked, Stop
    from pagestream_worker.stepping.engine_core import EngineCore, EngineCoreError, is_link_lost
    from pagestream_worker.stepping.engine_process import EngineProcess
    from pagestream_worker.stepping.engine_thread import EngineThread
    from pagestream_worker.stepping.process_main import TITLE, Program
    from pagestream_worker.stepping.reports import StepBegun
    from pagestream_worker.stepping.steps_ahead import STEPS_AHEAD

__all__ = [
    "STEPS_AHEAD",
    "TITLE",
    "AbortSequences",
    "AddGroup",
    "Command",
    "EngineCore",
    "EngineCoreError",
    "EngineProcess",
    "EngineThread",
    "Program",
    "StepBegun",
    "StepMarked",
    "Stop",
    "is_link_lost",
]

_MODULES = {
    **dict.fromkeys(("AbortSequences", "AddGroup", "Command", "StepMarked", "Stop"), "commands"),
    **dict.fromkeys(("EngineCore", "EngineCoreError", "is_link_lost"), "engine_core"),
    "EngineProcess": "engine_process",
    "EngineThread": "engine_thread",
    **dict.fromkeys(("TITLE", "Program"), "process_main"),
    "StepBegun": "reports",
    "STEPS_AHEAD": "steps_ahead",
}
"""The module that defines each exported name."""


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
