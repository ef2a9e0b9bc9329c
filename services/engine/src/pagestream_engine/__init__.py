"""The engine: continuous batching over a paged KV cache, offline or fed from the durable token stream.

Names are imported when they are used: `pagestream_engine.scheduler` and others are used without the model's libraries.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pagestream_engine.config import EngineConfig
    from pagestream_engine.engine import Engine
    from pagestream_engine.llm import LLM
    from pagestream_engine.request.outputs import (
        CompletionOutput,
        EngineStats,
        Logprob,
        RequestOutput,
        StepOutput,
        TokenLogprob,
    )
    from pagestream_engine.request.sampling_params import SamplingParams
    from pagestream_engine.request.sequence import Sibling, TokenSequence
    from pagestream_engine.request.structured_outputs import StructuredOutputsParams
    from pagestream_engine.scheduler.policy import SchedulingPolicy
    from pagestream_engine.scheduler.policy_registry import register_policy

__all__ = [
    "LLM",
    "CompletionOutput",
    "Engine",
    "EngineConfig",
    "EngineStats",
    "Logprob",
    "RequestOutput",
    "SamplingParams",
    "SchedulingPolicy",
    "Sibling",
    "StepOutput",
    "StructuredOutputsParams",
    "TokenLogprob",
    "TokenSequence",
    "register_policy",
]

_MODULES = {
    "LLM": "llm",
    "Engine": "engine",
    "EngineConfig": "config",
    "SamplingParams": "request.sampling_params",
    "SchedulingPolicy": "scheduler.policy",
    "Sibling": "request.sequence",
    "StructuredOutputsParams": "request.structured_outputs",
    "TokenSequence": "request.sequence",
    "register_policy": "scheduler.policy_registry",
    **dict.fromkeys(
        ("CompletionOutput", "EngineStats", "Logprob", "RequestOutput", "StepOutput", "TokenLogprob"), "request.outputs"
    ),
}
"""The module that defines each exported name."""


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
