"""From pooled states to a vector, or to probabilities of labels."""

from __future__ import annotations

import numpy as np

from pagestream_engine.plan import Float32Array
from pagestream_engine.pooling.labels import SIGMOID, SOFTMAX
from pagestream_engine.sampling_params import STATES_DTYPE


def vector_of(states: bytes, *, dimensions: int = 0, normalize: bool = True) -> Float32Array:
    """Return pooled states as a vector, cut first and normalised then, as in vLLM.

    Args:
        states: `StepOutput.pooled`.
        dimensions: leading numbers that are kept; 0: all.
        normalize: whether it is divided by its length; one of zeros stays.
    """
    vector: Float32Array = np.frombuffer(states, STATES_DTYPE)[: dimensions or None].astype(np.float32)
    if not normalize:
        return vector
    length = float(np.linalg.norm(vector.astype(np.float64)))
    return (vector / length).astype(np.float32) if length else vector


def probabilities_of(states: bytes, activation: str) -> Float32Array:
    """Return the probabilities of a model's labels; its scores themselves by `IDENTITY`.

    Args:
        states: `StepOutput.pooled`: a score for each label.
        activation: `PoolingConfig.activation`.
    """
    scores = np.frombuffer(states, STATES_DTYPE).astype(np.float64)
    if activation == SOFTMAX:
        scores = np.exp(scores - scores.max())
        scores /= scores.sum()
    elif activation == SIGMOID:
        scores = 0.5 * (1.0 + np.tanh(0.5 * scores))  # without an overflow at either end
    return scores.astype(np.float32)
