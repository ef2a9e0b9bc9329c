"""Draw a token for each row: temperature, filters, then the largest of logits and noise.

By one kernel where there is one, in C++ on a CPU and in Triton on a GPU; `draw` is the reference of both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pagestream_engine.errors import InvariantViolation
from pagestream_engine.sampler.filters import apply_filters
from pagestream_engine.sampler.native.library import native_draws
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
    """(rows,) of a float dtype."""
    token_ids: Tensor
    """(rows,) int64."""


Draw = Callable[[Tensor, DrawParams, Tensor], Drawn]
"""See `draw`."""


def draw_for(device: torch.device) -> Draw:
    """Return what draws on a device: a kernel, or torch's operations on a CPU without the C++ kernels."""
    if device.type == "cuda":
        return draw_by_kernel
    return draw_natively if device.type == "cpu" and native_draws() is not None else draw


def largest(logits: Tensor) -> Drawn:
    """Return the lowest id among each row's largest.

    Without a kernel by `max`, at a sixth of what `argmax` takes in bfloat16.
    """
    kernels = native_draws() if logits.device.type == "cpu" else None
    found = None if kernels is None else kernels.largest(logits)
    return Drawn(*(logits.max(dim=-1) if found is None else found))


def draw(logits: Tensor, params: DrawParams, positions: Tensor) -> Drawn:
    """Sample from the filtered softmax of each row by Gumbel-max.

    Args:
        logits: (rows, vocab_size) float32, before temperature; overwritten.
        positions: (rows,) int64: index of each token within its output.
    """
    scaled = logits.div_(params.temperatures[:, None])
    apply_filters(scaled, top_k=params.top_k, top_p=params.top_p, min_p=params.min_p)
    return Drawn(*scaled.add_(gumbel(params.seeds, positions, logits.shape[-1])).max(dim=-1))


def draw_natively(logits: Tensor, params: DrawParams, positions: Tensor) -> Drawn:
    """Do `draw` by one C++ kernel: the same filters and noise, without temporaries. `logits` are contiguous."""
    kernels = native_draws()
    if kernels is None:
        raise InvariantViolation("the C++ kernels that draw are not loaded")
    values, token_ids = kernels.draw(
        logits,
        params.temperatures,
        params.seeds,
        positions,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
    )
    return Drawn(values, token_ids)


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
