import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pagestream_scaling import LatencyWindow
from pagestream_scaling.terms.term import pods_for
from pagestream_scaling.terms.ttft import missed


@pytest.mark.parametrize(
    ("amount", "pods"), [(0, 0), (0.01, 1), (1, 1), (0.8 * 3 / 0.8, 3), (3.01, 4), (math.inf, 10**6)]
)
def test_whole_pods(amount: float, pods: int) -> None:
    assert pods_for(amount) == pods


def test_misses_within_a_bucket_follow_an_exponential_tail_and_beyond_the_last_bound_all_count() -> None:
    window = LatencyWindow((1.0, 2.5, 5.0), (10, 30, 7, 4), 60)
    rate = math.log(41 / 11) / 1.5  # of the tail between 1 and 2.5 s
    assert missed(window, 2.0) == pytest.approx(41 * math.exp(-rate * 1.0))
    assert missed(window, 2.5) == 11
    assert missed(window, 60.0) == 4


def test_requests_that_just_missed_a_bound_below_the_objective_are_no_misses() -> None:
    """As in a healthy pool: one in twenty takes a little more than a second, none took 2.5 s."""
    window = LatencyWindow((1.0, 2.5, 5.0), (2850, 150, 0, 0), 60)
    assert missed(window, 2.0) < 0.01 * 3000 / 4


@settings(deadline=None)
@given(st.lists(st.integers(0, 100), min_size=4, max_size=4), st.floats(0.1, 10), st.floats(0.1, 10))
def test_a_stricter_objective_is_missed_by_no_fewer(counts: list[int], one: float, other: float) -> None:
    window = LatencyWindow((1.0, 2.5, 5.0), tuple(map(float, counts)), 60)
    stricter, milder = missed(window, min(one, other)), missed(window, max(one, other))
    assert stricter >= milder * (1 - 1e-12)  # powers are rounded
    assert 0 <= missed(window, one) <= sum(counts)
