import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pagestream_operator.scaling import LatencyWindow
from pagestream_operator.scaling.terms import missed, pods_for


@pytest.mark.parametrize(
    ("amount", "pods"), [(0, 0), (0.01, 1), (1, 1), (0.8 * 3 / 0.8, 3), (3.01, 4), (math.inf, 10**6)]
)
def test_whole_pods(amount: float, pods: int) -> None:
    assert pods_for(amount) == pods


def test_misses_within_a_bucket_are_counted_in_proportion_and_beyond_the_last_bound_all() -> None:
    window = LatencyWindow((1.0, 2.5, 5.0), (10, 30, 7, 4), 60)
    assert missed(window, 2.0) == pytest.approx(30 * 0.5 / 1.5 + 7 + 4)
    assert missed(window, 2.5) == 11
    assert missed(window, 60.0) == 4


@settings(deadline=None)
@given(st.lists(st.integers(0, 100), min_size=4, max_size=4), st.floats(0.1, 10), st.floats(0.1, 10))
def test_a_stricter_objective_is_missed_by_no_fewer(counts: list[int], one: float, other: float) -> None:
    window = LatencyWindow((1.0, 2.5, 5.0), tuple(map(float, counts)), 60)
    assert missed(window, min(one, other)) >= missed(window, max(one, other))
    assert 0 <= missed(window, one) <= sum(counts)
