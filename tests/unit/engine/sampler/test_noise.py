"""Noise depends on seed, position and token id alone, and is what it claims to be."""

from __future__ import annotations

import math

import torch
from pagestream_engine.sampler.noise import gumbel, random_bits, uniform

_MASK = (1 << 64) - 1


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def _reference_bits(seed: int, position: int, token_id: int) -> int:
    gamma = 0x9E3779B97F4A7C15
    state = _mix(_mix((seed + gamma) & _MASK) ^ (position * gamma & _MASK))
    return _mix((state + (token_id + 1) * gamma) & _MASK)


def test_splitmix64_known_answer() -> None:
    # The first outputs of splitmix64 from state 0, as its authors' C program prints them.
    assert [_mix(0x9E3779B97F4A7C15 * i & _MASK) for i in (1, 2)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]


def test_bits_equal_unsigned_arithmetic() -> None:
    seeds, positions = [0, 1, -1, 2**63 - 1, -(2**63)], [0, 1, 7, 4095, 2**40]
    bits = random_bits(torch.tensor(seeds), torch.tensor(positions), range(37))
    for row, (seed, position) in enumerate(zip(seeds, positions, strict=True)):
        expected = [_reference_bits(seed & _MASK, position, token_id) for token_id in range(37)]
        assert [value & _MASK for value in bits[row].tolist()] == expected


def test_noise_does_not_depend_on_the_batch() -> None:
    seeds, positions = torch.arange(64) * 977, torch.arange(64) % 5
    together = gumbel(seeds, positions, 1003)
    for row in (0, 13, 63):
        assert torch.equal(together[row], gumbel(seeds[row : row + 1], positions[row : row + 1], 1003)[0])


def test_noise_does_not_depend_on_how_it_is_cut_into_tiles() -> None:
    seeds, positions = torch.arange(30), torch.arange(30)
    assert torch.equal(gumbel(seeds, positions, 200_000)[7, :9000], gumbel(seeds, positions, 9000)[7])
    assert torch.equal(random_bits(seeds, positions, range(50))[:, 20:], random_bits(seeds, positions, range(20, 50)))


def test_streams_of_neighbours_differ() -> None:
    grid = torch.cartesian_prod(torch.arange(40), torch.arange(40))
    bits = random_bits(grid[:, 0], grid[:, 1], range(16))
    assert bits.unique().numel() == bits.numel()
    values = uniform(grid[:, 0], grid[:, 1], range(16)).double()
    for neighbour in (values.view(40, 40, 16).transpose(0, 1), values.view(40, 40, 16)):
        first, second = neighbour[:-1].flatten(), neighbour[1:].flatten()
        correlation = torch.corrcoef(torch.stack((first, second)))[0, 1].item()
        assert abs(correlation) < 4 / math.sqrt(len(first))


def test_uniform_by_chi_square() -> None:
    values = uniform(torch.arange(200), torch.arange(200) * 3, range(5000))
    assert values.min() > 0
    assert values.max() < 1
    counts = torch.histc(values, bins=256, min=0.0, max=1.0).double()
    expected = values.numel() / 256
    statistic = ((counts - expected) ** 2 / expected).sum().item()
    # 255 degrees of freedom: mean 255, standard deviation 22.6.
    assert abs(statistic - 255) < 4 * math.sqrt(2 * 255)


def test_gumbel_moments_and_finiteness() -> None:
    noise = gumbel(torch.arange(300), torch.zeros(300, dtype=torch.int64), 4000).double()
    assert noise.isfinite().all()
    tolerance = 5 * math.pi / math.sqrt(6 * noise.numel())
    assert abs(noise.mean().item() - 0.5772156649) < tolerance
    assert abs(noise.var().item() - math.pi**2 / 6) < 0.02
