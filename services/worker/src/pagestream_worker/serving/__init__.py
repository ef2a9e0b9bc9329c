"""The tasks of a serving engine process: claim, take outputs, append, mark, shut down.

Names are imported when they are used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pagestream_worker.serving.active_requests import ActiveRequests
    from pagestream_worker.serving.outputs import EngineFailed, StepOutputs

__all__ = [
    "ActiveRequests",
    "EngineFailed",
    "StepOutputs",
]

_MODULES = {
    "ActiveRequests": "active_requests",
    **dict.fromkeys(("EngineFailed", "StepOutputs"), "outputs"),
}
"""The module that defines each exported name."""


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
