"""Versions of what decides tokens, bits of logits, or text: kept by hand, and part of `Engine.fingerprint`.

Whoever changes a result raises its version: engines with other versions do not continue each other's streams at once.
Whoever moves, renames or rewrites code with the same results leaves it. tests/engine/numerics has the golden bits of
each version, and fails where bits have changed and the version has not.
"""

from __future__ import annotations

from collections.abc import Mapping

# Raise only where bits, tokens or text change: streams of the old version wait fingerprint_grace_ms in a rollout.
NUMERICS: Mapping[str, int] = {
    # The C++ of a CPU: attention, the small operators beside it, linears, adapters.
    "native": 2,
    # What a model computes and in which order: families, layers, how weights are read and quantised, adapters, parts
    # of a model that ranks add up; attention and operators in torch's operations.
    "torch": 2,
    # The Triton kernels, the plans by which they divide work, and the tables of their tile sizes.
    "triton": 2,
    # From logits to a token: what sampling parameters mean, grammars, penalties, filters, noise, draws (the C++ and
    # Triton ones too), which drafts hold, beams; log probabilities, and when an output ends.
    "sampling": 1,
    # Tokens to text: detokenization, stop strings, words as tokens.
    "text": 2,
}
"""By name. A version is raised by one."""
