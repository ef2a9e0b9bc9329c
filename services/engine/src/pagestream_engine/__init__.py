"""The engine: continuous batching over a paged KV cache, offline or fed from the durable token stream."""

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
from pagestream_engine.request.sibling import Sibling

__all__ = [
    "LLM",
    "CompletionOutput",
    "Engine",
    "EngineConfig",
    "EngineStats",
    "Logprob",
    "RequestOutput",
    "SamplingParams",
    "Sibling",
    "StepOutput",
    "TokenLogprob",
]
