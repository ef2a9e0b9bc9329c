"""Requests inside the engine: parameters, sequences, and the outputs that they produce."""

from pagestream_engine.request.adapter import Adapter, AdapterLoad, LoadedAdapter, LoRARequest
from pagestream_engine.request.beam_search import BeamSearch
from pagestream_engine.request.beam_search_params import BeamSearchParams
from pagestream_engine.request.generation import Generation, Taken
from pagestream_engine.request.length_predictor import LengthPredictor
from pagestream_engine.request.logprob_row import LogprobRow
from pagestream_engine.request.outputs import (
    BeamSearchOutput,
    BeamSearchSequence,
    ClassificationOutput,
    ClassificationRequestOutput,
    CompletionOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    EngineStats,
    Logprob,
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
    StepOutput,
    TokenLogprob,
)
from pagestream_engine.request.pooling_params import PoolingParams
from pagestream_engine.request.sampling_params import SamplingParams, child_seed
from pagestream_engine.request.sequence import SequenceGroup, SequenceState, Sibling, TokenSequence
from pagestream_engine.request.structured_outputs import ReasoningMarks, StructuredOutputsParams

__all__ = [
    "Adapter",
    "AdapterLoad",
    "BeamSearch",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EngineStats",
    "Generation",
    "LengthPredictor",
    "LoRARequest",
    "LoadedAdapter",
    "Logprob",
    "LogprobRow",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "ReasoningMarks",
    "RequestOutput",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "SequenceGroup",
    "SequenceState",
    "Sibling",
    "StepOutput",
    "StructuredOutputsParams",
    "Taken",
    "TokenLogprob",
    "TokenSequence",
    "child_seed",
]
