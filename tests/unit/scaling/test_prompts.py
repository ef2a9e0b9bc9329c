"""A prompt is computed by one pod: a single long one orders no more than that."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pagestream_scaling import RatePolicy, ScalingMemory, ScalingPolicy, StartupPolicy, decide
from pagestream_scaling.workload import divisible_tokens
from support.scaling.worlds import NOW, at, pool, queue, ready_pod, sample

LONG = 128_000.0
EACH = 2000.0
"""Prompt tokens per second of a pod."""
DRAIN_S = 10.0
"""Seconds over which the queue's drain rate is measured."""


@pytest.mark.parametrize("startup_s", [8.0, 60.0])
@pytest.mark.parametrize("pods", [1, 4, 40])
def test_one_long_prompt_orders_at_most_one_pod(pods: int, startup_s: float) -> None:
    """Two thirds busy with prompts of 1,000 tokens; one of 128,000 waits for 6 s and is claimed."""
    policy = ScalingPolicy(
        min_replicas=1, max_replicas=100, startup=StartupPolicy(prior_s=startup_s), rate=RatePolicy(up_pods=100)
    )
    drain = 0.66 * EACH * pods
    crowd = queue(running=3 * pods, drain=drain, depth=1, tokens=1000, age_s=0.05, longest_tokens=1000)
    calm = replace(pool([0.66] * pods, crowd), replicas=pods)
    calm = replace(
        calm,
        pods=tuple(
            ready_pod(pod.name, sample(utilization=0.66), age_s=9000.0, startup_s=startup_s) for pod in calm.pods
        ),
    )
    memory, usual = ScalingMemory(), 0
    for second in range(-700, 0, 2):
        decision, memory = decide(policy, at(calm, NOW + second), memory)
        usual = max(usual, decision.desired)
    most = 0
    for second in range(0, 60, 2):
        shown = at(calm, NOW + second)
        if second < 6:
            waiting = replace(shown.queue, depth=1, tokens=LONG, longest_tokens=LONG, age_s=max(0.1, float(second)))
        else:
            part = LONG / DRAIN_S if second < 6 + DRAIN_S else 0.0
            running = 3 * pods + 1
            waiting = replace(
                shown.queue, drain_tokens_per_s=drain + part, drain_longest_per_s=max(part, 100.0), running=running
            )
        decision, memory = decide(policy, replace(shown, queue=waiting), memory)
        most = max(most, decision.desired)
    assert most <= max(usual, pods) + 1, decision.reason


def test_more_pods_than_requests_could_not_work_at_once() -> None:
    policy = ScalingPolicy(min_replicas=1, max_replicas=100, rate=RatePolicy(up_pods=100))
    shown = pool([0.9], queue(depth=2, tokens=2 * LONG, age_s=1.0, running=1, drain=500))
    assert decide(policy, shown, ScalingMemory())[0].desired == 3


@settings(deadline=None)
@given(st.integers(1, 50), st.floats(1, 1e6), st.floats(0, 1e6), st.floats(1, 1e6), st.floats(0, 1e5))
def test_the_largest_prompt_counts_up_to_the_limit(
    others: int, mean: float, longest: float, most_each: float, more: float
) -> None:
    shown = queue(depth=others + 1, tokens=others * mean + longest, longest_tokens=longest)
    counted = divisible_tokens(shown, most_each)
    assert 0 <= counted <= shown.tokens
    assert counted <= (others + 1) * most_each
    if max(mean, longest) <= most_each:
        assert counted == pytest.approx(shown.tokens)
    heavier = replace(shown, tokens=shown.tokens + more, longest_tokens=longest + more)
    assert divisible_tokens(heavier, most_each) >= counted * (1 - 1e-12)
