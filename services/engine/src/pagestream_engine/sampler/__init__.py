"""From logits to tokens."""

from pagestream_engine.sampler.batch import SamplingBatch
from pagestream_engine.sampler.sampled import DrawFault, LogprobTensors, Sampled
from pagestream_engine.sampler.stages.token_mask import TokenMasks

__all__ = ["DrawFault", "LogprobTensors", "Sampled", "SamplingBatch", "TokenMasks"]
