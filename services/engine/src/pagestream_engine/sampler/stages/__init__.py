"""Stages that change logits before temperature, each with resident state for the rows that use it."""

from pagestream_engine.sampler.stages.allowed_tokens import AllowedTokens
from pagestream_engine.sampler.stages.bad_words import BadWords
from pagestream_engine.sampler.stages.logit_bias import LogitBias
from pagestream_engine.sampler.stages.min_tokens import MinTokens
from pagestream_engine.sampler.stages.penalties import Penalties
from pagestream_engine.sampler.stages.stage import LogitsStage, NewRow, StageRows

__all__ = [
    "AllowedTokens",
    "BadWords",
    "LogitBias",
    "LogitsStage",
    "MinTokens",
    "NewRow",
    "Penalties",
    "StageRows",
]
