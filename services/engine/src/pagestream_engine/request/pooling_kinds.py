"""Which hidden states of a prompt make its vector."""

LAST, MEAN, CLS = "last", "mean", "cls"
"""The last token's, the mean of all tokens', the first token's."""
KINDS = (LAST, MEAN, CLS)
OF_WHOLE_PROMPTS = (MEAN, CLS)
"""Those that need states which a cached prefix does not have: the prompt is computed, not read from the cache."""
STATES_DTYPE = "<f4"
"""Of `StepOutput.pooled`: float32 in little-endian order."""
