"""From a scheduled step to sampled tokens.

The names are found on first use: features that `runner` imports import parts of this package.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pagestream_engine.runner.graphs import CudaGraphRecorder, EagerRecorder, Step
    from pagestream_engine.runner.runner import ModelRunner

__all__ = ["CudaGraphRecorder", "EagerRecorder", "ModelRunner", "Step"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{'runner' if name == 'ModelRunner' else 'graphs'}"), name)
