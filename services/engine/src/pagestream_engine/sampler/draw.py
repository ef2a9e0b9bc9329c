"""Draw a token for each row: temperature, filters, then the largest of logits and noise.

By one kernel where there is one, in C++ on a CPU (an image's library, or one compiled for this machine) and in Triton
on a GPU; `draw` is the reference of both. The filters min-p, top-k and top-p are thresholds on the logits.

The noise is a pure function of (seed, position, token id): whatever else is in the batch, whichever device computes it
and however often a request is moved or preempted, it is the same. The bits are those of splitmix64 (Steele, Lea and
Flood 2014, "Fast splittable pseudorandom number generators"; constants by Stafford's mix 13): each (seed, position) is
hashed to a starting state, and token id i takes output i of the stream from there. It is counter-based, as Philox is,
at a third of the integer operations on a vectorised CPU. All arithmetic is in int64, whose wrap-around is that of
uint64.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pagestream_engine.cpu import find_library, instruction_sets, read_cpuinfo
from pagestream_engine.errors import InvariantViolation, NativeBuildError
from pagestream_engine.native_build import cached
from pagestream_engine.sampler.native.levels import PREBUILT, levels_of, library_for


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


_FIRST_LOOK = 1024
"""Largest logits that are looked at before a row is sorted whole: a sort of 64 rows costs far more than a topk."""


def apply_filters(logits: Tensor, *, top_k: Tensor | None, top_p: Tensor | None, min_p: Tensor | None) -> None:
    """Set what does not stay to -inf, in place, in the order min-p, top-k, top-p.

    Each filter keeps all logits at or above a threshold, so that ties at its border stay together and no outcome
    depends on how a sort orders equal values. The likeliest token always stays.

    Args:
        logits: (rows, vocab_size) float32, after temperature.
        top_k: (rows,) int64, at least 1: this many stay; the vocabulary's size keeps all. None: no row filters.
        top_p: (rows,) float32 in (0, 1]: the fewest likeliest tokens with at least this probability stay; 1 keeps all.
        min_p: (rows,) float32 in [0, 1]: what is less likely than this times the likeliest goes; 0 keeps all.
    """
    if min_p is not None:
        floor = logits.amax(dim=-1, keepdim=True) + min_p.log()[:, None]
        logits.masked_fill_(logits < floor, -torch.inf)
    if top_k is not None or top_p is not None:
        logits.masked_fill_(logits < _threshold(logits, top_k, top_p)[:, None], -torch.inf)


def _threshold(logits: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> Tensor:
    """(rows,): the smallest logit that stays; -inf where all do.

    A row that its largest logits do not settle is sorted whole, alone: no row's outcome depends on the others.
    """
    vocab_size = logits.shape[-1]
    ks = logits.new_full((len(logits),), vocab_size, dtype=torch.int64) if top_k is None else top_k
    ps = logits.new_ones(len(logits)) if top_p is None else top_p
    if logits.device.type != "cpu":
        # A device would have to be waited for to know which rows are settled.
        return _threshold_within(logits.sort(dim=-1, descending=True).values, logits, ks, ps)[0]
    looked = min(vocab_size, _FIRST_LOOK)
    threshold, settled = _threshold_within(logits.topk(looked, dim=-1).values, logits, ks, ps)
    left = (~settled).nonzero().squeeze(1)
    if len(left):
        rows = logits[left]
        ordered = rows.sort(dim=-1, descending=True).values
        threshold[left] = _threshold_within(ordered, rows, ks[left], ps[left])[0]
    return threshold


def _threshold_within(largest: Tensor, logits: Tensor, top_k: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """Each row's threshold as far as its largest logits (descending) show it, and whether they do, (rows,) each."""
    looked, vocab_size = largest.shape[-1], logits.shape[-1]
    limited = top_k < vocab_size
    border = largest.gather(1, top_k.clamp(max=looked)[:, None] - 1).squeeze(1)
    border = border.masked_fill(~limited, -torch.inf)
    kept = largest.masked_fill(largest < border[:, None], -torch.inf)
    total = torch.where(limited, _logsumexp(kept), _logsumexp(logits))
    mass = (kept - total[:, None]).exp().cumsum(dim=-1)
    # A token stays while the probability before it is below top_p.
    before = torch.cat((torch.zeros_like(mass[:, :1]), mass[:, :-1]), dim=-1)
    stays = (before < top_p[:, None]) & (kept > -torch.inf)
    last = kept.gather(1, stays.sum(dim=-1, keepdim=True).clamp_(min=1) - 1).squeeze(1)
    nucleus = top_p < 1.0
    whole = looked == vocab_size
    settled = (~limited | (top_k < looked)) & (~nucleus | limited | (mass[:, -1] >= top_p))
    return torch.where(nucleus, last, border), settled | whole


def _logsumexp(rows: Tensor) -> Tensor:
    """Each row's, whatever is beside it: torch adds up a single long row by threads, and so in another order."""
    return rows.repeat(2, 1).logsumexp(dim=-1)[:1] if len(rows) == 1 else rows.logsumexp(dim=-1)


_GAMMA = -7046029254386353131  # 0x9E3779B97F4A7C15, 2^64 / golden ratio
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB
_HALF_STEP = 0.5
_TILE = 1 << 16
"""Elements that a CPU computes at a time, so that its dozen passes run in the cache: a third of the time or less."""
_LARGEST = 1.0 - 2.0**-24  # below 1 in float32: the noise stays finite


def gumbel(seeds: Tensor, positions: Tensor, num_tokens: int) -> Tensor:
    """Standard Gumbel noise for every token id.

    Adding it to logits and taking the largest samples from their softmax (the Gumbel-max trick).

    Args:
        seeds: (rows,) int64.
        positions: (rows,) int64: index of the token to sample within the request's output.

    Returns:
        (rows, num_tokens) float32, finite.
    """
    noise = torch.empty(len(seeds), num_tokens, device=seeds.device)
    tile = _TILE if seeds.device.type == "cpu" else max(1, noise.numel())
    width = min(num_tokens, tile)
    height = tile // width
    for row in range(0, len(seeds), height):
        rows = slice(row, row + height)
        for first in range(0, num_tokens, width):
            ids = range(first, min(first + width, num_tokens))
            exponential = torch.log1p(uniform(seeds[rows], positions[rows], ids).neg_()).neg_()
            noise[rows, first : ids.stop] = exponential.log_().neg_()
    return noise


def uniform(seeds: Tensor, positions: Tensor, ids: range) -> Tensor:
    """(rows, ids) float32 in (0, 1), of 53 random bits: fine near 0, whence the largest Gumbel values come."""
    bits = random_bits(seeds, positions, ids)
    numbers = _logical_shift(bits, 11).to(torch.float32).add_(_HALF_STEP)
    return numbers.mul_(2.0**-53).clamp_(max=_LARGEST)


def random_bits(seeds: Tensor, positions: Tensor, ids: range) -> Tensor:
    """(rows, ids) int64: 64 random bits for each row and token id of a contiguous range."""
    state = _mix(_mix(seeds + _GAMMA) ^ (positions * _GAMMA))
    counters = torch.arange(ids.start + 1, ids.stop + 1, dtype=torch.int64, device=seeds.device) * _GAMMA
    return _mix(state[:, None] + counters)


def _mix(z: Tensor) -> Tensor:
    z = z ^ _logical_shift(z, 30)
    z = z.mul_(_MIX_1)
    z = z.bitwise_xor_(_logical_shift(z, 27)).mul_(_MIX_2)
    return z.bitwise_xor_(_logical_shift(z, 31))


def _logical_shift(z: Tensor, count: int) -> Tensor:
    """Right shift that fills with zeros; torch's fills with the sign."""
    return (z >> count).bitwise_and_((1 << (64 - count)) - 1)


_P, _N, _I = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
_SUFFIXES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}

_log = logging.getLogger(__name__)


class NativeDraws:
    """The kernels of one library. Every tensor is on the CPU."""

    def __init__(self, library: ctypes.CDLL) -> None:
        def bind(name: str, *arguments: type) -> Any:
            function: Any = getattr(library, name)
            function.argtypes, function.restype = arguments, None
            return function

        self._draw = bind("draw", *[_P] * 7, _N, _N, _P, _P, _I)
        self._largest = {
            dtype: bind(f"largest_{suffix}", _P, _N, _N, _P, _P, _I) for dtype, suffix in _SUFFIXES.items()
        }

    def largest(self, logits: Tensor) -> tuple[Tensor, Tensor] | None:
        """The largest of each row, float32, and its lowest id, (rows,) each; None for a layout without a kernel.

        Args:
            logits: (rows, vocab_size). A row with a NaN gives NaN.
        """
        kernel = self._largest.get(logits.dtype)
        if kernel is None or not logits.is_contiguous():
            return None
        values, token_ids = _results(logits)
        kernel(logits.data_ptr(), *logits.shape, values.data_ptr(), token_ids.data_ptr(), torch.get_num_threads())
        return values, token_ids

    def draw(
        self,
        logits: Tensor,
        temperatures: Tensor,
        seeds: Tensor,
        positions: Tensor,
        *,
        top_k: Tensor | None,
        top_p: Tensor | None,
        min_p: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Draw as `sampler.draw.draw` does; return what each token was chosen by, float32, and its id, (rows,) each.

        Args:
            logits: (rows, vocab_size) float32, contiguous; overwritten.
            temperatures: (rows,) float32.
            seeds: (rows,) int64.
            positions: (rows,) int64.
            top_k: (rows,) int64 from 1 on, or None.
            top_p: (rows,) float32, or None.
            min_p: (rows,) float32, or None.

        Raises:
            InvariantViolation: the logits are not as said.
        """
        if logits.dtype != torch.float32 or not logits.is_contiguous() or logits.device.type != "cpu":
            raise InvariantViolation(
                f"draw: given logits in {logits.dtype} on {logits.device} with strides {logits.stride()}, "
                "expected contiguous torch.float32 on a CPU"
            )
        values, token_ids = _results(logits)
        given = [temperatures.contiguous(), seeds.contiguous(), positions.contiguous()]
        filters = [None if each is None else each.contiguous() for each in (top_k, top_p, min_p)]
        self._draw(
            logits.data_ptr(),
            *(each.data_ptr() for each in given),
            *(None if each is None else each.data_ptr() for each in filters),
            *logits.shape,
            values.data_ptr(),
            token_ids.data_ptr(),
            torch.get_num_threads(),
        )
        return values, token_ids


@cache
def native_draws() -> NativeDraws | None:
    """Return this machine's kernels; None (and one warning) where they can't be had."""
    levels = levels_of(instruction_sets(read_cpuinfo()))
    if not levels:
        return None
    try:
        path = find_library(PREBUILT, "draw", levels) or cached(library_for(levels[0]))
        # Torch is loaded by now, so that the OpenMP runtime that this resolves to is torch's own: one pool of threads.
        return NativeDraws(ctypes.CDLL(str(path)))
    except (OSError, NativeBuildError) as error:
        _log.warning("the C++ kernels that draw can't be used, torch's operations do, slower: %s", error)
        return None


def _results(logits: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty(len(logits), dtype=torch.float32), torch.empty(len(logits), dtype=torch.int64)
