"""The covers of `pairwise`: small, complete, and the same in every process."""

from __future__ import annotations

import itertools

from support.pairwise import pairwise, product

FACTORS: dict[str, list[object]] = {"a": [1, 2, 3], "b": [True, False], "c": ["x", "y", "z", "w"], "d": [None, 0.5]}


def test_every_pair_of_values_occurs_in_few_cases() -> None:
    cover = pairwise(FACTORS)
    assert cover == pairwise(FACTORS)
    assert len(cover) <= 16 < len(product(FACTORS))
    for (first, firsts), (second, seconds) in itertools.combinations(FACTORS.items(), 2):
        assert {(case[first], case[second]) for case in cover} == set(itertools.product(firsts, seconds))


def test_one_factor_is_its_values() -> None:
    assert pairwise({"a": [1, 2]}) == [{"a": 1}, {"a": 2}]
