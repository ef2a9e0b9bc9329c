import math
from dataclasses import fields, replace

import pytest
from pagestream_scaling import (
    BacklogPolicy,
    IdlePolicy,
    KvUtilizationPolicy,
    PanicPolicy,
    PolicyInvalid,
    RatePolicy,
    SamplesPolicy,
    ScalingError,
    ScalingPolicy,
    StabilizationPolicy,
    StartupPolicy,
    TtftPolicy,
)

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
