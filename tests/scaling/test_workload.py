"""What is learnt of arrivals and of what a pod can do; long prompts and priority classes in it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pagestream_scaling import (
    BacklogPolicy,
    ClassSample,
    Limit,
    PodSample,
    PolicyInvalid,
    PoolObservation,
    RatePolicy,
    ScalingMemory,
    ScalingPolicy,
    StartupPolicy,
    decide,
)
from pagestream_scaling.workload import divisible_tokens, weighted_age, weighted_drain, weighted_part
from scaling.worlds import NOW, at, pool, queue, ready_pod, sample, starting_pod

# -- What is learnt of arrivals and of what a pod can do


POLICY = ScalingPolicy(
    min_replicas=1, max_replicas=100, rate=RatePolicy(up_pods=100), backlog=BacklogPolicy(forget_s=600.0)
)


def working(
    count: int,
    utilization: float,
    *,
    prompt: float,
    generated: float,
    drain: float,
    tokens: float = 0,
    age_s: float = 0,
) -> PoolObservation:
    """Equal pods that compute `prompt` and `generated` tokens a second each, of `drain` in all that they claim."""
    sample = PodSample(NOW, utilization, 8, 0, prompt, generated)
    shown = pool([utilization] * count, queue(depth=tokens / 100, tokens=tokens, age_s=age_s, drain=drain))
    return replace(shown, pods=tuple(replace(pod, sample=sample) for pod in shown.pods))


def watched(
    observation: PoolObservation, seconds: int, memory: ScalingMemory | None = None, *, ago: int = 0
) -> ScalingMemory:
    """The memory after it was shown for so long, with a sample every 2 s, up to 2 s before `ago` seconds before NOW."""
    memory = memory or ScalingMemory()
    for second in range(seconds + ago, ago, -2):
        _, memory = decide(POLICY, at(observation, NOW - second), memory)
    return memory


def capacity(observation: PoolObservation, memory: ScalingMemory) -> float:
    return decide(POLICY, observation, memory)[0].inputs["capacity"]


def test_capacity_is_what_pods_do_while_entries_wait() -> None:
    full = working(4, 1.0, prompt=600, generated=100, drain=2400, tokens=5000, age_s=2.0)
    assert capacity(full, watched(full, 30)) == pytest.approx(600)


def test_a_forgotten_entry_is_no_saturation() -> None:
    calm = working(4, 0.5, prompt=600, generated=100, drain=2400, tokens=50, age_s=30.0)
    assert capacity(calm, watched(calm, 30)) == pytest.approx(1200)  # by load: twice what half full pods do


def test_longer_answers_make_a_pod_do_less_before_any_queue_has_formed() -> None:
    """1,000 work a second each; then each prompt token brings twice the work."""
    full = working(4, 1.0, prompt=600, generated=100, drain=2400, tokens=5000, age_s=2.0)
    memory = watched(full, 60, ago=60)
    short = working(4, 0.5, prompt=300, generated=50, drain=1200)
    longer = working(4, 0.5, prompt=200, generated=100, drain=800)
    assert capacity(short, watched(short, 58, memory)) == pytest.approx(600, rel=0.02)
    # 1,000 work a second at 3 for each prompt token where 5 / 3 were
    assert capacity(longer, watched(longer, 58, memory)) == pytest.approx(1000 / 3, rel=0.1)


def test_pods_with_room_are_never_taken_for_full_ones() -> None:
    """A prior that is far too low must not order pods that will have even less to do."""
    policy = replace(POLICY, backlog=BacklogPolicy(prior_tokens_per_s=10.0))
    light = working(4, 0.05, prompt=5000, generated=100, drain=20_000)
    memory = ScalingMemory()
    for second in range(60, 0, -2):
        decision, memory = decide(policy, at(light, NOW - second), memory)
        assert decision.desired == 4


def test_capacity_seen_at_saturation_is_kept_and_then_given_up() -> None:
    full = working(4, 1.0, prompt=600, generated=0, drain=2400, tokens=5000, age_s=2.0)
    light = working(4, 0.3, prompt=500, generated=0, drain=2000)
    memory = watched(full, 60, ago=600)
    assert capacity(light, watched(light, 598, memory)) == pytest.approx(600, rel=0.01)
    memory = watched(full, 60, ago=3000)
    assert capacity(light, watched(light, 2998, memory)) > 1500  # what the load says is 500 / 0.3


def test_nothing_is_learnt_while_pods_are_new() -> None:
    """Their number is new, what they drain is not yet: dividing one by the other would order as many again."""
    full = working(4, 1.0, prompt=600, generated=100, drain=2400, tokens=5000, age_s=2.0)
    memory = watched(full, 60, ago=8)
    grown = working(16, 0.25, prompt=150, generated=25, drain=2400, tokens=5000, age_s=2.0)
    assert capacity(grown, watched(grown, 6, memory)) == pytest.approx(600)


def test_what_arrives_is_what_left_and_what_the_backlog_grew_by() -> None:
    first = working(4, 0.5, prompt=100, generated=0, drain=400, tokens=1000)
    _, memory = decide(POLICY, at(first, NOW - 2), ScalingMemory())
    second = working(4, 0.5, prompt=100, generated=0, drain=400, tokens=1600)
    _, memory = decide(POLICY, second, memory)
    assert memory.arrivals[-1] == (NOW, 400 + 300)


def test_capacity_is_held_for_rises_that_came_before_where_they_are_more_than_the_margin() -> None:
    """Bursts of 2,000 tokens/s above a level of about 400 come every minute: steady load of that level needs less."""
    policy = replace(POLICY, backlog=BacklogPolicy(arrival_quantile=1.0))
    held = []
    for burst in (0, 2000):
        memory = ScalingMemory()
        for step in range(90):
            drain = 400 + (burst if step % 30 == 15 else 0)
            shown = at(working(4, 0.5, prompt=100, generated=0, drain=drain), NOW + 2 * step)
            decision, memory = decide(policy, shown, memory)
        held.append(decision.inputs["arrivals_high"])
    assert held[0] == pytest.approx(400 / policy.backlog.busy)
    assert held[1] > 400 + 0.9 * 2000


def test_a_level_that_has_fallen_is_not_held_for_its_height() -> None:
    """What the window remembers are rises above the level: a day's decline is followed within `level_window_s`."""
    memory = ScalingMemory()
    for step in range(120):
        shown = at(working(4, 0.5, prompt=100, generated=0, drain=4000 - 30 * step), NOW + 2 * step)
        decision, memory = decide(POLICY, shown, memory)
    assert decision.inputs["arrivals_high"] < (4000 - 30 * (119 - 15)) / POLICY.backlog.busy


def test_one_sample_counts_once() -> None:
    shown = working(4, 0.5, prompt=100, generated=0, drain=400, tokens=1000)
    _, memory = decide(POLICY, shown, ScalingMemory())
    for second in (1, 2, 3):
        _, again = decide(POLICY, replace(shown, time_s=NOW + second), memory)
        assert again.arrivals == memory.arrivals


def test_pods_on_their_way_are_credited_in_the_projected_backlog() -> None:
    """40 s of work wait; what 6 pods of the 10 s start-up will have done of it by the horizon is not ordered."""
    shown = working(4, 1.0, prompt=1000, generated=0, drain=4000, tokens=160_000, age_s=3.0)
    memory = watched(shown, 20)
    alone, _ = decide(POLICY, shown, memory)
    coming = tuple(starting_pod(f"new-{index}", age_s=8.0) for index in range(6))
    credited, _ = decide(POLICY, replace(shown, pods=(*shown.pods, *coming), replicas=10), memory)
    done = 6 * 8.0 * 1000  # ready in 2 s, 8 s before the horizon
    assert alone.inputs["backlog_left"] - credited.inputs["backlog_left"] == pytest.approx(done)


def test_age_orders_no_more_while_what_it_ordered_drains_the_queue() -> None:
    before = working(4, 0.5, prompt=600, generated=0, drain=2400, tokens=1000, age_s=9.0)
    after = working(8, 0.5, prompt=300, generated=0, drain=2400, tokens=1000, age_s=9.0)
    memory = watched(before, 30, ago=12)
    answers = []
    for second in range(12, -1, -1):
        decision, memory = decide(POLICY, at(after, NOW - second), memory)
        answers.append(decision.desired)
    assert answers == [8] * 10 + [12] * 3  # drain_s after the last pod became ready it is evidence again


def test_a_rise_is_carried_on_over_the_start_up_where_that_is_asked_for() -> None:
    rising = [working(4, 0.5, prompt=100, generated=0, drain=400 + 10 * step) for step in range(60)]
    levels = []
    for trend in (0.0, 1.0):
        policy = replace(POLICY, backlog=BacklogPolicy(trend=trend))
        memory = ScalingMemory()
        for step, shown in enumerate(rising):
            decision, memory = decide(policy, at(shown, NOW + 2 * step), memory)
        levels.append(decision.inputs["arrivals"])
    assert levels[1] == pytest.approx(levels[0] + 10 / 2 * 10, rel=0.02)  # 5 tokens/s more each second, for 10 s


def test_a_backlog_of_long_answers_counts_for_more_than_its_prompts() -> None:
    """By the outputs that are expected of it, beside those of the requests of late; within the policy's bound."""
    usual = working(4, 1.0, prompt=600, generated=150, drain=2400, tokens=40_000, age_s=1.0)
    memory = watched(usual, 60)

    def backlog(output: float | None) -> float:
        assert usual.queue is not None
        shown = replace(usual, queue=replace(usual.queue, output_tokens=output))
        return decide(POLICY, shown, memory)[0].inputs["backlog_tokens"]

    mix = 1 + POLICY.backlog.generated_weight * 150 / 600
    assert backlog(None) == 40_000
    assert backlog(40_000 * 150 / 600) == pytest.approx(40_000, rel=0.05), "as usual"
    assert backlog(40_000 * 0.5) == pytest.approx(40_000 * (1 + POLICY.backlog.generated_weight * 0.5) / mix, rel=0.05)
    assert backlog(10**9) == pytest.approx(80_000)
    assert backlog(1) == 40_000


# -- A prompt is computed by one pod: a single long one orders no more than that


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


# -- Priority classes: a backlog of a low class counts by its weight


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
