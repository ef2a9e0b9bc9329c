"""From logits to tokens."""

from pagestream_engine.sampler.batch import SamplingBatch
from pagestream_engine.sampler.draw import DrawParams, draw, draw_by_kernel, draw_for, draw_natively
from pagestream_engine.sampler.filters import apply_filters
from pagestream_engine.sampler.noise import gumbel
from pagestream_engine.sampler.prompt_logprobs import num_rows_within, prompt_logprobs
from pagestream_engine.sampler.sampled import DrawFault, LogprobTensors, Sampled
from pagestream_engine.sampler.stages.token_mask import TokenMasks

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
