from __future__ import annotations

import itertools

import pytest
from support.kernels import cases as kernel_cases
from support.pairwise import pairwise, product


@pytest.mark.parametrize("kernel", kernel_cases.FACTORS)
def test_every_pair_of_values_occurs(kernel: str) -> None:
    factors = kernel_cases.FACTORS[kernel]
    cover = pairwise(factors)
    assert len(cover) <= len(product(factors))
    for (first, firsts), (second, seconds) in itertools.combinations(factors.items(), 2):
        seen = {(case[first], case[second]) for case in cover}
        assert seen == set(itertools.product(firsts, seconds))


def test_cover_is_the_same_each_time() -> None:
    factors = kernel_cases.FACTORS["paged_decode"]
    assert pairwise(factors) == pairwise(factors)


def test_one_factor_is_its_values() -> None:
    assert pairwise({"a": [1, 2]}) == [{"a": 1}, {"a": 2}]
