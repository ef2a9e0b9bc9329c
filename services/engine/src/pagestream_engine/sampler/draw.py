"""Draw a token for each row: temperature, filters, then the largest of logits and noise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pagestream_engine.sampler.filters import apply_filters
from pagestream_engine.sampler.noise import gumbel


@dataclass(frozen=True, slots=True)
class DrawParams:
    """Parameters of the rows that are drawn, on the device of their logits."""

    temperatures: Tensor
    """(rows,) float32, above 0."""
    seeds: Tensor
    """(rows,) int64."""
    top_k: Tensor | None
    """(rows,) int64, vocabulary size where all tokens stay; None where no row filters so, as with the two below."""
    top_p: Tensor | None
    """(rows,) float32."""
    min_p: Tensor | None
    """(rows,) float32."""


class Drawn(NamedTuple):
    """The chosen tokens, and what they were chosen by: NaN or -inf where no token can be chosen."""

    values: Tensor
    """(rows,) of the logits' dtype."""
    token_ids: Tensor
    """(rows,) int64."""


Draw = Callable[[Tensor, DrawParams, Tensor], Drawn]
"""See `draw`."""


def draw_for(device: torch.device) -> Draw:
    """Return what draws on a device: the kernel on a GPU."""
    return draw_by_kernel if device.type == "cuda" else draw


def largest(logits: Tensor) -> Drawn:
    """Return the lowest id among each row's largest. By `max`, at a sixth of what `argmax` takes in bfloat16."""
    return Drawn(*logits.max(dim=-1))


def draw(logits: Tensor, params: DrawParams, positions: Tensor) -> Drawn:
    """Sample from the filtered softmax of each row by Gumbel-max.

    Args:
        logits: (rows, vocab_size) float32, before temperature; overwritten.
        params: of the rows.
        positions: (rows,) int64: index of each token within its output.
    """
    scaled = logits.div_(params.temperatures[:, None])
    apply_filters(scaled, top_k=params.top_k, top_p=params.top_p, min_p=params.min_p)
    return largest(scaled.add_(gumbel(params.seeds, positions, logits.shape[-1])))


def draw_by_kernel(logits: Tensor, params: DrawParams, positions: Tensor) -> Drawn:
    """Do `draw` by one Triton kernel, without a sort: the same filters and noise."""
    from pagestream_kernels import filter_and_draw  # imports Triton

    token_ids, values = filter_and_draw(
        logits,
        params.temperatures,
        params.seeds,
        positions,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
    )
    return Drawn(values, token_ids)
