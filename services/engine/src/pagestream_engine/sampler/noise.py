"""Noise as a pure function of (seed, position, token id).

Whatever else is in the batch, whichever device computes it and however often a request is moved or preempted: the same
seed and position give the same noise. The bits are those of splitmix64 (Steele, Lea and Flood 2014, "Fast splittable
pseudorandom number generators"; constants by Stafford's mix 13): each (seed, position) is hashed to a starting state,
and token id i takes output i of the stream from there. It is counter-based, as Philox is, at a third of the integer
operations on a vectorised CPU. All arithmetic is in int64, whose wrap-around is that of uint64.
"""

from __future__ import annotations

import torch
from torch import Tensor

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
