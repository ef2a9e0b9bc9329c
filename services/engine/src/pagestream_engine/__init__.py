"""The engine: continuous batching over a paged KV cache, offline or fed from the durable token stream.

Names are imported when they are used: `pagestream_engine.scheduler` and others are used without the model's libraries.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pagestream_engine.capacity import Capacity, measure_capacity
    from pagestream_engine.config import AdapterConfig, EngineConfig, EngineOptions, SchedulerConfig
    from pagestream_engine.engine import Engine
    from pagestream_engine.errors import (
        AdapterChanged,
        AdapterError,
        AdapterFileError,
        AdapterMismatch,
        ConfigError,
        EngineAsleep,
        EngineError,
        ExecutorDied,
        ExecutorError,
        InvalidRequest,
        InvalidSamplingParams,
        InvariantViolation,
        ModelError,
        ModelFileError,
        ModelNotFound,
        ModelTooLarge,
        NodeRefused,
        NodesMissing,
        OutOfMemory,
        PromptTooLong,
        RankLost,
        RequestFault,
        SleepFailed,
        UnsupportedAdapter,
        UnsupportedModel,
        UnsupportedOption,
        WeightsError,
    )
    from pagestream_engine.llm import LLM
    from pagestream_engine.request.adapter import LoRARequest
    from pagestream_engine.request.outputs import (
        ClassificationOutput,
        CompletionOutput,
        EmbeddingOutput,
        EngineStats,
        Logprob,
        RequestOutput,
        StepOutput,
        TokenLogprob,
    )
    from pagestream_engine.request.sampling_params import SamplingParams
    from pagestream_engine.request.sequence import Sibling, TokenSequence
    from pagestream_engine.request.structured_outputs import ReasoningMarks, StructuredOutputsParams
    from pagestream_engine.scheduler.policy import SchedulingPolicy
    from pagestream_engine.scheduler.policy_registry import register_policy
    from pagestream_engine.sizing import CARDS, ModelSize, largest_batches, size_model

__all__ = [
    "CARDS",
    "LLM",
    "AdapterChanged",
    "AdapterConfig",
    "AdapterError",
    "AdapterFileError",
    "AdapterMismatch",
    "Capacity",
    "ClassificationOutput",
    "CompletionOutput",
    "ConfigError",
    "EmbeddingOutput",
    "Engine",
    "EngineAsleep",
    "EngineConfig",
    "EngineError",
    "EngineOptions",
    "EngineStats",
    "ExecutorDied",
    "ExecutorError",
    "InvalidRequest",
    "InvalidSamplingParams",
    "InvariantViolation",
    "LoRARequest",
    "Logprob",
    "ModelError",
    "ModelFileError",
    "ModelNotFound",
    "ModelSize",
    "ModelTooLarge",
    "NodeRefused",
    "NodesMissing",
    "OutOfMemory",
    "PromptTooLong",
    "RankLost",
    "ReasoningMarks",
    "RequestFault",
    "RequestOutput",
    "SamplingParams",
    "SchedulerConfig",
    "SchedulingPolicy",
    "Sibling",
    "SleepFailed",
    "StepOutput",
    "StructuredOutputsParams",
    "TokenLogprob",
    "TokenSequence",
    "UnsupportedAdapter",
    "UnsupportedModel",
    "UnsupportedOption",
    "WeightsError",
    "largest_batches",
    "measure_capacity",
    "register_policy",
    "size_model",
]

_NAMES = {
    "capacity": ("Capacity", "measure_capacity"),
    "config": ("AdapterConfig", "EngineConfig", "EngineOptions", "SchedulerConfig"),
    "engine": ("Engine",),
    "errors": (
        "AdapterChanged",
        "AdapterError",
        "AdapterFileError",
        "AdapterMismatch",
        "ConfigError",
        "EngineAsleep",
        "EngineError",
        "ExecutorDied",
        "ExecutorError",
        "InvalidRequest",
        "InvalidSamplingParams",
        "InvariantViolation",
        "ModelError",
        "ModelFileError",
        "ModelNotFound",
        "ModelTooLarge",
        "NodeRefused",
        "NodesMissing",
        "OutOfMemory",
        "PromptTooLong",
        "RankLost",
        "RequestFault",
        "SleepFailed",
        "UnsupportedAdapter",
        "UnsupportedModel",
        "UnsupportedOption",
        "WeightsError",
    ),
    "llm": ("LLM",),
    "request.adapter": ("LoRARequest",),
    "request.outputs": (
        "ClassificationOutput",
        "CompletionOutput",
        "EmbeddingOutput",
        "EngineStats",
        "Logprob",
        "RequestOutput",
        "StepOutput",
        "TokenLogprob",
    ),
    "request.sampling_params": ("SamplingParams",),
    "request.sequence": ("Sibling", "TokenSequence"),
    "request.structured_outputs": ("ReasoningMarks", "StructuredOutputsParams"),
    "scheduler.policy": ("SchedulingPolicy",),
    "scheduler.policy_registry": ("register_policy",),
    "sizing": ("CARDS", "ModelSize", "largest_batches", "size_model"),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}
"""The module that defines each exported name."""


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
