"""Parts of the law by themselves: its memory, its terms, the policy, and which pods end first."""

import math
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pagestream_scaling import (
    BacklogPolicy,
    IdlePolicy,
    KvUtilizationPolicy,
    LatencyWindow,
    PanicPolicy,
    PodObservation,
    PodState,
    PolicyInvalid,
    RatePolicy,
    SamplesPolicy,
    ScalingError,
    ScalingPolicy,
    StabilizationPolicy,
    StartupPolicy,
    TtftPolicy,
    drain_order,
)
from pagestream_scaling.memory import Window, with_highest, with_lowest
from pagestream_scaling.terms import missed, pods_for
from scaling.worlds import NOW, ready_pod, sample, starting_pod

ENTRIES = st.lists(st.tuples(st.integers(0, 7), st.integers(0, 9)), min_size=1, max_size=60)


@given(ENTRIES, st.integers(0, 20))
def test_windows_hold_the_highest_and_the_lowest(steps: list[tuple[int, int]], span: int) -> None:
    now, seen = 0, []
    highest: Window = ()
    lowest: Window = ()
    for passed, value in steps:
        now += passed
        seen.append((now, value))
        highest, lowest = with_highest(highest, now, value, span), with_lowest(lowest, now, value, span)
        recent = [each for time, each in seen if now - time <= span]
        assert highest[0][1] == max(recent)
        assert lowest[0][1] == min(recent)
        assert len(highest) <= 10
        assert len(lowest) <= 10


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


@given(st.lists(st.integers(0, 100), min_size=4, max_size=4), st.floats(0.1, 10), st.floats(0.1, 10))
def test_a_stricter_objective_is_missed_by_no_fewer(counts: list[int], one: float, other: float) -> None:
    window = LatencyWindow((1.0, 2.5, 5.0), tuple(map(float, counts)), 60)
    stricter, milder = missed(window, min(one, other)), missed(window, max(one, other))
    assert stricter >= milder * (1 - 1e-12)  # powers are rounded
    assert 0 <= missed(window, one) <= sum(counts)


GROUPS = (
    KvUtilizationPolicy,
    BacklogPolicy,
    TtftPolicy,
    StartupPolicy,
    PanicPolicy,
    StabilizationPolicy,
    RatePolicy,
    IdlePolicy,
    SamplesPolicy,
)


def test_the_defaults_are_the_documented_ones() -> None:
    policy = ScalingPolicy()
    assert (policy.kv_utilization.target, policy.kv_utilization.low) == (0.80, 0.60)
    assert (policy.ttft.objective_s, policy.ttft.attainment) == (2.0, 0.99)


@pytest.mark.parametrize(
    ("group", "values", "named"),
    [
        (KvUtilizationPolicy, {"target": 1.2}, "kv_utilization.target"),
        (KvUtilizationPolicy, {"low": 0.8}, "kv_utilization.low"),
        (BacklogPolicy, {"busy": 0.0}, "backlog.busy"),
        (BacklogPolicy, {"arrival_quantile": 1.1}, "backlog.arrival_quantile"),
        (TtftPolicy, {"attainment": 1.0}, "ttft.attainment"),
        (StartupPolicy, {"overdue_factor": 0.5}, "startup.overdue_factor"),
        (PanicPolicy, {"threshold": 1.0}, "panic.threshold"),
        (PanicPolicy, {"hold_startups": -1.0}, "panic.hold_startups"),
        (StabilizationPolicy, {"down_s": -1.0}, "stabilization.down_s"),
        (StabilizationPolicy, {"down_startups": 11.0}, "stabilization.down_startups"),
        (RatePolicy, {"up_pods": 0}, "rate.up_pods"),
        (IdlePolicy, {"after_s": math.inf}, "idle.after_s"),
        (SamplesPolicy, {"stale_s": 0.0}, "samples.stale_s"),
        (ScalingPolicy, {"min_replicas": -1}, "min_replicas"),
        (ScalingPolicy, {"min_replicas": 5, "max_replicas": 4}, "max_replicas"),
        (ScalingPolicy, {"min_replicas": 0, "max_replicas": 0}, "max_replicas"),
    ],
)
def test_numbers_out_of_range_are_named(group: type, values: dict[str, float], named: str) -> None:
    with pytest.raises(PolicyInvalid, match=rf"scaling policy: {named} is .*; it must be ") as refused:
        group(**values)
    assert refused.value.field == named
    assert isinstance(refused.value, ScalingError)


@pytest.mark.parametrize("group", GROUPS)
def test_no_field_takes_what_is_not_a_number(group: type) -> None:
    for entry in fields(group):
        with pytest.raises(PolicyInvalid):
            replace(group(), **{entry.name: math.nan})


def names(*pods: PodObservation) -> list[str]:
    return [pod.name for pod in drain_order(pods)]


def test_the_cheapest_goes_first() -> None:
    full = ready_pod("full", sample(utilization=0.9, running=2))
    light = ready_pod("light", sample(utilization=0.1, running=9))
    lighter = ready_pod("lighter", sample(utilization=0.1, running=1))
    assert names(full, light, lighter) == ["lighter", "light", "full"]


def test_pods_that_serve_nobody_yet_go_before_all_and_the_youngest_of_them_first() -> None:
    empty = ready_pod("empty", sample(utilization=0.0, running=0))
    assert names(empty, starting_pod("older", age_s=9), starting_pod("newer", age_s=1)) == ["newer", "older", "empty"]


def test_a_pod_that_was_ready_and_is_not_now_may_hold_streams() -> None:
    hurt = replace(ready_pod("hurt", sample(utilization=0.8)), state=PodState.STARTING)
    assert names(hurt, ready_pod("fine", sample(utilization=0.2))) == ["fine", "hurt"]


def test_what_is_unknown_counts_as_full() -> None:
    unknown, absurd = ready_pod("unknown", None), ready_pod("absurd", sample(utilization=math.nan))
    assert names(unknown, absurd, ready_pod("full", sample(utilization=1.0)))[0] == "full"


def test_equal_pods_have_one_order() -> None:
    older = ready_pod("a", sample(NOW), age_s=700)
    younger = ready_pod("b", sample(NOW), age_s=600)
    assert names(older, younger) == names(younger, older) == ["b", "a"]
