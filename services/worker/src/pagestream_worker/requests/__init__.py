"""What an engine process keeps of its requests: the log to write, the sampling, the room that they take.

Names are imported when they are used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pagestream_worker.requests.claim_budget import UNLIMITED_TOKENS, ClaimBudget
    from pagestream_worker.requests.prompt_parts import PART_BYTES
    from pagestream_worker.requests.running_request import RunningRequest
    from pagestream_worker.requests.sampling import child_of, sampling_of, sampling_of_child

__all__ = [
    "PART_BYTES",
    "UNLIMITED_TOKENS",
    "ClaimBudget",
    "RunningRequest",
    "child_of",
    "sampling_of",
    "sampling_of_child",
]

_MODULES = {
    **dict.fromkeys(("UNLIMITED_TOKENS", "ClaimBudget"), "claim_budget"),
    "PART_BYTES": "prompt_parts",
    "RunningRequest": "running_request",
    **dict.fromkeys(("child_of", "sampling_of", "sampling_of_child"), "sampling"),
}
"""The module that defines each exported name."""


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
