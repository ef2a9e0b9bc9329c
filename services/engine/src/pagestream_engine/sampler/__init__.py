"""From logits to tokens."""

from pagestream_engine.sampler.batch import DrawFault, LogprobTensors, Sampled, SamplingBatch
from pagestream_engine.sampler.draw import (
    DrawParams,
    apply_filters,
    draw,
    draw_by_kernel,
    draw_for,
    draw_natively,
    gumbel,
)
from pagestream_engine.sampler.logprobs import num_rows_within, prompt_logprobs
from pagestream_engine.sampler.stages import TokenMasks

__all__ = [
    "DrawFault",
    "DrawParams",
    "LogprobTensors",
    "Sampled",
    "SamplingBatch",
    "TokenMasks",
    "apply_filters",
    "draw",
    "draw_by_kernel",
    "draw_for",
    "draw_natively",
    "gumbel",
    "num_rows_within",
    "prompt_logprobs",
]
