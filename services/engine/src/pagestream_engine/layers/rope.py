"""Rotary position embedding: the angles of each position, with the scalings that stretch a model's context.

The frequencies of every scaling come from `transformers`, whose checkpoints they belong to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pagestream_engine.errors import ModelFileError

ROPE_KINDS = ("default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional")
"""`default`, and the keys of `transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS`."""


class RopeContext(NamedTuple):
    """How many tokens a rotation serves."""

    num_tokens: int
    """Where nothing else is asked for."""
    extended: int
    """At most; beyond `num_tokens` all positions rotate by other frequencies."""


@dataclass(frozen=True)
class Rope:
    """A rotation's parameters, as a model's configuration has them."""

    head_dim: int
    theta: float = 10_000.0
    """Base of the wavelengths."""
    kind: str = "default"
    """One of ROPE_KINDS."""
    max_position_embeddings: int = 2048
    """Context of the configuration, in tokens: what some scalings are relative to."""
    share: float = 1.0
    """Part of the head that rotates; the elements after it stay as they are."""
    interleaved: bool = False
    """Whether neighbours 2i and 2i + 1 turn together, in place of i and i + rotary_dim / 2."""
    scaling: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """The scaling's own parameters by their names in `rope_parameters`."""

    @property
    def rotary_dim(self) -> int:
        """Leading elements of a head that rotate."""
        return int(self.head_dim * self.share)

    @property
    def context(self) -> RopeContext:
        """How many tokens a sequence may have."""
        return rope_context(self.kind, self.scaling, self.max_position_embeddings)


def rope_context(kind: str, scaling: Mapping[str, Any], max_position_embeddings: int) -> RopeContext:
    """Return the context of a scaling with these parameters, in a model of this `max_position_embeddings`.

    Raises:
        ModelFileError: a parameter is no number.
    """
    try:
        original = int(scaling.get("original_max_position_embeddings") or max_position_embeddings)
        factor = float(scaling.get("factor") or 1.0)
    except (TypeError, ValueError) as error:
        raise ModelFileError(
            f"config.json: rope scaling: given {dict(scaling)!r}, expected numbers: {error}"
        ) from error
    match kind:
        case "longrope":
            return RopeContext(min(original, max_position_embeddings), max_position_embeddings)
        case "dynamic":
            return RopeContext(max_position_embeddings, int(max_position_embeddings * max(factor, 1.0)))
        case "yarn":
            longest = max(max_position_embeddings, int(original * factor))
            return RopeContext(longest, longest)
    return RopeContext(max_position_embeddings, max_position_embeddings)


def cos_sin_table(rope: Rope, num_positions: int, device: torch.device) -> Tensor:
    """(num_positions, rotary_dim) float32: cosines, then sines, of each position's `rotary_dim / 2` angles."""
    frequencies, factor = rope_frequencies(rope, num_positions)
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies)
    return torch.cat((angles.cos() * factor, angles.sin() * factor), dim=-1).to(device)


def rope_frequencies(rope: Rope, num_tokens: int) -> tuple[Tensor, float]:
    """Return the frequencies, (rotary_dim / 2,) float32 in radians a token, and the factor of cosines and sines.

    Where a scaling depends on a request's length, every request gets the frequencies of one of `num_tokens` tokens.

    Raises:
        ModelFileError: the scaling lacks a parameter.
    """
    if rope.kind == "default":
        steps = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / rope.rotary_dim
        return 1.0 / rope.theta**steps, 1.0
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {
        **rope.scaling,
        "rope_type": rope.kind,
        "rope_theta": rope.theta,
        "partial_rotary_factor": rope.share,
    }
    try:
        frequencies, factor = ROPE_INIT_FUNCTIONS[rope.kind](_RopeConfig(rope, parameters), seq_len=num_tokens)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ModelFileError(
            f"config.json: rope scaling: given {dict(rope.scaling)!r}, expected the parameters of {rope.kind!r}: "
            f"{error!r}"
        ) from error
    return frequencies.float(), float(factor)


class _RopeConfig:
    """The fields of a configuration that `ROPE_INIT_FUNCTIONS` read."""

    def __init__(self, rope: Rope, parameters: dict[str, Any]) -> None:
        self.rope_parameters = parameters
        self.head_dim = self.hidden_size = rope.head_dim
        self.num_attention_heads = 1
        self.max_position_embeddings = rope.max_position_embeddings

    def standardize_rope_params(self) -> None:
        """Leave the parameters: they are in the current form."""
