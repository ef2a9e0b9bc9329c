"""The engine: continuous batching over a paged KV cache, offline or fed from the durable token stream.

Names are imported when they are used: `pagestream_engine.scheduler` and others are used without the model's libraries.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pagestream_engine.config import AdapterConfig, EngineConfig, EngineOptions, SchedulerConfig
    from pagestream_engine.engine import Capacity, Engine, measure_capacity
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
        MessageError,
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
    from pagestream_engine.offline.llm import LLM
    from pagestream_engine.offline.llm_engine import (
        Counter,
        Gauge,
        LLMEngine,
        Metric,
        Vector,
        cleanup_dist_env_and_memory,
    )
    from pagestream_engine.offline.options import EngineArgs, FlexibleArgumentParser, VllmOptions
    from pagestream_engine.offline.outputs import (
        BeamSearchOutput,
        BeamSearchSequence,
        ClassificationOutput,
        ClassificationRequestOutput,
        CompletionOutput,
        EmbeddingOutput,
        EmbeddingRequestOutput,
        Logprob,
        PoolingOutput,
        PoolingRequestOutput,
        RequestOutput,
        ScoringOutput,
        ScoringRequestOutput,
    )
    from pagestream_engine.offline.prompts import Prompt, TextPrompt, TokensPrompt
    from pagestream_engine.request import Choice, LoRARequest, Request, Sequence, SequenceOutput, TokenLogprob
    from pagestream_engine.sampling_params import (
        BeamSearchParams,
        PoolingParams,
        ReasoningMarks,
        SamplingParams,
        StructuredOutputsParams,
    )
    from pagestream_engine.scheduler.policies import SchedulingPolicy, register_policy
    from pagestream_engine.sizing import CARDS, ModelSize, largest_batches, size_model
    from pagestream_engine.stats import EngineStats

__all__ = [
    "CARDS",
    "LLM",
    "AdapterChanged",
    "AdapterConfig",
    "AdapterError",
    "AdapterFileError",
    "AdapterMismatch",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "Capacity",
    "Choice",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "ConfigError",
    "Counter",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "Engine",
    "EngineArgs",
    "EngineAsleep",
    "EngineConfig",
    "EngineError",
    "EngineOptions",
    "EngineStats",
    "ExecutorDied",
    "ExecutorError",
    "FlexibleArgumentParser",
    "Gauge",
    "InvalidRequest",
    "InvalidSamplingParams",
    "InvariantViolation",
    "LLMEngine",
    "LoRARequest",
    "Logprob",
    "MessageError",
    "Metric",
    "ModelError",
    "ModelFileError",
    "ModelNotFound",
    "ModelSize",
    "ModelTooLarge",
    "NodeRefused",
    "NodesMissing",
    "OutOfMemory",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "Prompt",
    "PromptTooLong",
    "RankLost",
    "ReasoningMarks",
    "Request",
    "RequestFault",
    "RequestOutput",
    "SamplingParams",
    "SchedulerConfig",
    "SchedulingPolicy",
    "ScoringOutput",
    "ScoringRequestOutput",
    "Sequence",
    "SequenceOutput",
    "SleepFailed",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokenLogprob",
    "TokensPrompt",
    "UnsupportedAdapter",
    "UnsupportedModel",
    "UnsupportedOption",
    "Vector",
    "VllmOptions",
    "WeightsError",
    "cleanup_dist_env_and_memory",
    "largest_batches",
    "measure_capacity",
    "register_policy",
    "size_model",
]

_NAMES = {
    "config": (
        "AdapterConfig",
        "EngineConfig",
        "EngineOptions",
        "SchedulerConfig",
    ),
    "engine": (
        "Capacity",
        "Engine",
        "measure_capacity",
    ),
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
        "MessageError",
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
    "offline.llm": ("LLM",),
    "offline.llm_engine": (
        "Counter",
        "Gauge",
        "LLMEngine",
        "Metric",
        "Vector",
        "cleanup_dist_env_and_memory",
    ),
    "offline.options": (
        "EngineArgs",
        "FlexibleArgumentParser",
        "VllmOptions",
    ),
    "offline.outputs": (
        "BeamSearchOutput",
        "BeamSearchSequence",
        "ClassificationOutput",
        "ClassificationRequestOutput",
        "CompletionOutput",
        "EmbeddingOutput",
        "EmbeddingRequestOutput",
        "Logprob",
        "PoolingOutput",
        "PoolingRequestOutput",
        "RequestOutput",
        "ScoringOutput",
        "ScoringRequestOutput",
    ),
    "offline.prompts": (
        "Prompt",
        "TextPrompt",
        "TokensPrompt",
    ),
    "request": (
        "LoRARequest",
        "Request",
        "Choice",
        "SequenceOutput",
        "TokenLogprob",
        "Sequence",
    ),
    "sampling_params": (
        "BeamSearchParams",
        "PoolingParams",
        "ReasoningMarks",
        "SamplingParams",
        "StructuredOutputsParams",
    ),
    "scheduler.policies": (
        "SchedulingPolicy",
        "register_policy",
    ),
    "sizing": (
        "CARDS",
        "ModelSize",
        "largest_batches",
        "size_model",
    ),
    "stats": ("EngineStats",),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}
"""The module that defines each exported name."""


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
