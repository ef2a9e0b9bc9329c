"""Priority classes: a backlog of a low class counts by its weight."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pagestream_scaling import (
    BacklogPolicy,
    ClassSample,
    Limit,
    PolicyInvalid,
    RatePolicy,
    ScalingMemory,
    ScalingPolicy,
    decide,
)
from pagestream_scaling.classes import weighted_age, weighted_drain, weighted_part
from support.scaling.worlds import NOW, at, pool, queue

WIDE = ScalingPolicy(min_replicas=1, max_replicas=100, rate=RatePolicy(up_pods=100))
CLASSES = st.lists(
    st.builds(
        ClassSample,
        st.sampled_from(["0", "1", "2", "7", "resume"]),
        st.floats(0, 1e6),
        st.floats(0, 1e4),
        st.floats(0, 1e5),
    ),
    max_size=4,
    unique_by=lambda each: each.name,
)


def desired(*classes: ClassSample) -> int:
    tokens = sum(each.tokens for each in classes)
    age_s = max(each.age_s for each in classes)
    waiting = queue(depth=200, tokens=tokens, age_s=age_s, running=20, drain=4000)
    return decide(WIDE, pool([0.5] * 4, replace(waiting, classes=classes)), ScalingMemory())[0].desired


def test_a_backlog_of_class_2_orders_less_than_one_of_class_0() -> None:
    urgent, batch = desired(ClassSample("0", 60_000, 1.0)), desired(ClassSample("2", 60_000, 1.0))
    assert batch < urgent
    both = desired(ClassSample("0", 60_000, 1.0), ClassSample("2", 60_000, 1.0))
    assert urgent <= both < desired(ClassSample("0", 120_000, 1.0))


def test_an_old_request_of_class_2_waits_longer_before_it_orders() -> None:
    assert desired(ClassSample("2", 200, 15.0)) == desired(ClassSample("2", 200, 0.1)) == 4
    assert desired(ClassSample("2", 200, 25.0)) > 4
    assert desired(ClassSample("0", 200, 15.0)) > 4


def test_a_standing_batch_keeps_pods_full_and_grows_the_pool_no_further() -> None:
    """Before, full caches asked for a quarter more pods each time, up to the maximum."""
    memory, pods = ScalingMemory(), 4
    for second in range(0, 900, 2):
        drain = 1000.0 * pods
        batch = ClassSample("2", 20_000.0, 18.0, drain)
        shown = queue(depth=60, tokens=20_000, age_s=18.0, running=8 * pods, drain=drain)
        observed = pool([0.98] * pods, replace(shown, classes=(batch,)))
        decision, memory = decide(WIDE, at(observed, NOW + second), memory)
        pods = decision.desired
    assert pods <= 4
    assert decision.limiting is not Limit.MAX


@settings(deadline=None)
@given(CLASSES, st.floats(0, 2e6), st.floats(0, 2e5))
def test_weights_stay_within_0_and_1_and_full_weights_change_nothing(
    classes: list[ClassSample], tokens: float, drain: float
) -> None:
    age_s = max((each.age_s for each in classes), default=3.0)
    shown = replace(queue(depth=5, tokens=tokens, age_s=age_s, drain=drain), classes=tuple(classes))
    own, full = BacklogPolicy(), BacklogPolicy(class_weights=(1.0,))
    assert 0 <= weighted_part(shown, own) <= 1 + 1e-9
    assert weighted_part(shown, full) == pytest.approx(1)
    assert weighted_age(shown, own) <= weighted_age(shown, full) == age_s
    part = weighted_drain(shown, full)
    assert part is None or part == pytest.approx(1)


@pytest.mark.parametrize("weights", [(), (1.5,), (1.0, -0.1)])
def test_weights_are_numbers_from_0_to_1(weights: tuple[float, ...]) -> None:
    with pytest.raises(PolicyInvalid, match="class_weights"):
        BacklogPolicy(class_weights=weights)
