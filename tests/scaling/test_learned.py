"""What the law has measured outlives its process, replaces what was believed, and paces removals until it is there."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from pagestream_scaling import (
    BacklogPolicy,
    LatencyWindow,
    Learned,
    Limit,
    PodSample,
    PolicyInvalid,
    PoolObservation,
    RatePolicy,
    ScalingMemory,
    ScalingPolicy,
    decide,
    resumed,
    without_capacity,
)
from scaling.worlds import NOW, FluidPool, at, pool, queue

POLICY = ScalingPolicy(min_replicas=1, max_replicas=40)
KNOWN = Learned(capacity=700.0, capacity_s=NOW - 60)


def computing(count: int, arrivals: float, *, startup_s: float = 60.0) -> FluidPool:
    """A pool that computing limits: at capacity its caches are 0.4 full, as with room for 2.5 times the work."""
    return FluidPool.with_ready(
        count, lambda _: arrivals, POLICY, capacity=1000.0, startup_s=startup_s, noise=lambda _: 0.4
    )


def late_seconds(world: FluidPool, seconds: int) -> int:
    """Run; return the seconds at whose end more waits than the pool serves in two seconds."""
    late = 0
    for _ in range(seconds):
        world.step()
        late += world.backlog > 2.0 * world.ready * world.capacity
    return late


def working(
    utilization: float, each: float, *, count: int = 4, tokens: float = 0.0, age_s: float = 0.0
) -> PoolObservation:
    """Pods that do `each` work a second, and what waits."""
    shown = pool([utilization] * count, queue(depth=tokens / 100, tokens=tokens, age_s=age_s, drain=count * each))
    sample = PodSample(NOW, utilization, 8, 0, each, 0.0)
    return replace(shown, pods=tuple(replace(pod, sample=sample) for pod in shown.pods))


def measured(memory: ScalingMemory) -> float | None:
    """The capacity that was seen, unless a part of it is still belief."""
    known = Learned.of(memory)
    return None if known.believed else known.capacity


def capacity(observation: PoolObservation, memory: ScalingMemory) -> float:
    return decide(POLICY, observation, memory)[0].inputs["capacity"]


# -- a pool that is healthy stays so


@pytest.mark.served
@pytest.mark.parametrize("startup_s", [8.0, 60.0])
def test_a_pool_that_was_never_short_is_not_halved(startup_s: float) -> None:
    world = computing(20, 14_000.0, startup_s=startup_s)
    assert late_seconds(world, 900) <= 60
    assert min(decision.desired for decision in world.decisions) >= 13
    assert any(decision.limiting is Limit.UNPROVEN for decision in world.decisions)


@pytest.mark.served
def test_a_restart_with_what_was_measured_removes_no_more_than_no_restart() -> None:
    world = computing(10, 14_000.0)
    world.run(900)
    before = len(world.created)
    world.memory = resumed(ScalingMemory(), Learned.of(world.memory), POLICY, world.now).memory
    assert late_seconds(world, 300) <= 3
    assert len(world.created) >= before - 1


@pytest.mark.served
def test_a_restart_without_it_finds_out_one_step_at_a_time() -> None:
    world = computing(20, 14_000.0)
    world.run(900)
    before = len(world.created)
    world.memory = ScalingMemory()
    late_seconds(world, 300)
    assert min(decision.desired for decision in world.decisions[-300:]) >= before - 5


@pytest.mark.served
def test_what_was_served_before_is_proven_and_needs_no_steps() -> None:
    """The load halves: with half of the pods none does more than it has done."""
    world = FluidPool.with_ready(
        20, lambda t: 14_000.0 if t < 300 else 3500.0, POLICY, capacity=1000.0, startup_s=60.0, noise=lambda _: 0.4
    )
    world.run(300)
    before = len(world.created)
    world.run(150)
    assert len(world.created) <= before / 2


@pytest.mark.parametrize(
    ("counts", "steps"),
    [
        (None, [10, 9, 8]),
        ((600.0, 0.0, 0.0), [10, 7, 5]),
        ((590.0, 10.0, 0.0), [10, 9, 8]),
        ((600.0, 0.0, 0.0, 0.0), [10]),
        ((40.0, 0.0, 0.0), [10, 9, 8]),
    ],
    ids=["unknown", "far within", "one in sixty later", "absurd", "few"],
)
def test_steps_are_larger_while_first_tokens_come_far_within_the_objective(
    counts: tuple[float, ...] | None, steps: list[int]
) -> None:
    """A pod that computing limits makes requests wait before it is full: 0.3 s of the 2 s are far within."""
    ttft = None if counts is None else LatencyWindow((0.3, 1.0), counts, 60.0)
    memory, seen_steps = ScalingMemory(), [10]
    for second in range(0, 116, 2):
        count = seen_steps[-1]
        shown = replace(at(working(0.1, 1000 / count, count=count), NOW + second), ttft=ttft)
        decision, memory = decide(POLICY, shown, memory)
        seen_steps += [decision.desired] * (decision.desired != count)
    assert seen_steps == steps


# -- what is measured replaces what is believed


def seen(shown: PoolObservation, seconds: int, memory: ScalingMemory | None = None, *, ago: int = 0) -> ScalingMemory:
    """The memory after it was shown for so long, with a sample every 2 s, up to 2 s before `ago` seconds before NOW."""
    memory = memory or ScalingMemory()
    for second in range(seconds + ago, ago, -2):
        _, memory = decide(POLICY, at(shown, NOW - second), memory)
    return memory


LIGHT = working(0.3, 600.0)
FULL = working(0.4, 700.0, tokens=5000.0, age_s=1.0)


def test_the_first_saturation_that_lasts_replaces_a_belief() -> None:
    memory = seen(LIGHT, 60, ago=20)
    assert capacity(at(LIGHT, NOW - 20), memory) == pytest.approx(2000.0)  # 600 / 0.3
    known = []
    for number, each in enumerate((700.0, 900.0, 800.0, 700.0, 900.0, 800.0, 800.0)):
        full = working(0.4, each, tokens=5000.0, age_s=1.0)
        _, memory = decide(POLICY, at(full, NOW - 20 + 2 * number), memory)
        known.append(measured(memory))
    assert known[:6] == [None] * 5 + [pytest.approx(800.0)], "the mean of 10 s"
    assert known[6] == pytest.approx(800.0)


def test_a_moment_of_saturation_is_no_measurement_unless_the_policy_says_so() -> None:
    for measure_s, expected in ((10.0, None), (0.0, pytest.approx(700.0))):
        policy, memory = replace(POLICY, backlog=BacklogPolicy(measure_s=measure_s)), seen(LIGHT, 60, ago=20)
        for second in range(20, 0, -2):
            shown = FULL if second % 4 == 0 else LIGHT
            _, memory = decide(policy, at(shown, NOW - second), memory)
        assert measured(memory) == expected


def test_many_moments_of_saturation_are_one_measurement() -> None:
    light = working(0.3, 600.0, count=8)
    busy = working(0.4, 700.0, count=8, tokens=30_000.0, age_s=1.0)
    memory, words = seen(light, 60, ago=200), []
    for second in range(200, 0, -2):
        decision, memory = decide(POLICY, at(light if second % 8 else busy, NOW - second), memory)
        words += ["measured" in decision.reason] * (second % 8 == 0)
    assert words.index(True) == pytest.approx(16, abs=2)
    assert all(words[words.index(True) :])
    assert Learned.of(memory).believed < 0.2


def test_one_long_prompt_that_waits_is_no_saturation() -> None:
    memory = ScalingMemory()
    for second in range(60, 0, -2):
        shown = working(0.4, 600.0, tokens=50_000.0, age_s=10.0)
        assert shown.queue is not None
        shown = replace(shown, queue=replace(shown.queue, depth=1.0, longest_tokens=50_000.0))
        _, memory = decide(POLICY, at(shown, NOW - second), memory)
    assert Learned.of(memory).capacity is None


def test_a_capacity_that_no_longer_holds_is_replaced_as_well() -> None:
    policy = replace(POLICY, backlog=BacklogPolicy(forget_s=100.0))
    memory = resumed(ScalingMemory(), Learned(2500.0, NOW - 200), policy, NOW).memory
    for second in range(40, -12, -2):
        _, memory = decide(policy, at(LIGHT if second > 0 else FULL, NOW - second), memory)
    assert Learned.of(memory).capacity == pytest.approx(700.0)


def test_the_sentence_says_whether_capacity_was_measured() -> None:
    busy = working(0.4, 700.0, tokens=30_000.0, age_s=0.1)
    for known, word in ((Learned(), "believed"), (KNOWN, "measured")):
        memory = resumed(ScalingMemory(), known, POLICY, NOW).memory
        assert f"/s ({word})" in decide(POLICY, busy, memory)[0].reason


# -- what is kept


def test_what_is_kept_is_measured_and_comes_back() -> None:
    memory = seen(FULL, 120)
    known = Learned.of(memory)
    assert known.capacity == pytest.approx(700.0)
    assert known.capacity_s == known.rise_s == NOW - 2
    again = resumed(ScalingMemory(), known, POLICY, NOW).memory
    assert capacity(LIGHT, again) == pytest.approx(700.0)
    assert Learned.of(seen(LIGHT, 120)).capacity is None, "an estimate from load is a belief"


def test_the_first_sample_of_a_process_counts_less_than_what_was_measured() -> None:
    """Its pods may be new: what they drain is not yet what they could."""
    young = working(0.1, 50.0, tokens=5000.0, age_s=1.0)
    _, memory = decide(POLICY, young, resumed(ScalingMemory(), KNOWN, POLICY, NOW).memory)
    assert Learned.of(memory).capacity == 700.0


def test_a_later_measurement_of_another_process_counts_and_an_earlier_one_does_not() -> None:
    memory = seen(FULL, 120)
    for known, expected in ((Learned(500.0, NOW - 600), 700.0), (Learned(500.0, NOW - 1), 500.0)):
        later = resumed(memory, known, POLICY, NOW).memory
        assert Learned.of(later).capacity == pytest.approx(expected)


PRIOR = POLICY.backlog.prior_tokens_per_s


@pytest.mark.parametrize("number", [math.nan, math.inf, -1.0])
def test_numbers_that_can_not_be_true_are_dropped_by_name(number: float) -> None:
    assert resumed(ScalingMemory(), Learned(), POLICY, NOW) == (ScalingMemory(), {})
    for known, name in ((Learned(number, NOW), "capacity"), (Learned(rise=number, rise_s=NOW), "rise")):
        memory, dropped = resumed(ScalingMemory(), known, POLICY, NOW)
        assert (memory, list(dropped)) == (ScalingMemory(), [name])


@pytest.mark.parametrize(
    ("capacity", "is_kept"),
    [(0.0, False), (PRIOR / 1001, False), (PRIOR / 999, True), (PRIOR * 999, True), (PRIOR * 1001, False)],
)
def test_a_capacity_that_is_a_thousand_times_what_is_usual_is_dropped(capacity: float, is_kept: bool) -> None:
    memory, dropped = resumed(ScalingMemory(), Learned(capacity, NOW - 1), POLICY, NOW)
    assert (memory.capacity == capacity, not dropped) == (is_kept, is_kept)


def test_a_part_of_belief_that_is_no_part_makes_the_capacity_a_belief() -> None:
    for part in (math.nan, -0.1, 1.1):
        memory, dropped = resumed(ScalingMemory(), Learned(700.0, NOW - 1, part), POLICY, NOW)
        assert (memory.capacity, memory.believed, list(dropped)) == (700.0, 1.0, ["believed"])


@pytest.mark.parametrize("time_s", [math.nan, math.inf, None])
def test_without_a_time_nothing_counts(time_s: float | None) -> None:
    known = Learned(700.0, time_s, rise=100.0, rise_s=time_s)
    memory, dropped = resumed(ScalingMemory(), known, POLICY, NOW)
    assert (memory, sorted(dropped)) == (ScalingMemory(), ["capacity", "rise"])


def test_a_time_of_a_clock_that_is_ahead_is_now_where_nothing_was_measured() -> None:
    ahead = Learned(900.0, NOW + 3600)
    memory, dropped = resumed(ScalingMemory(), ahead, POLICY, NOW)
    assert (memory.capacity, memory.capacity_s, dropped) == (900.0, NOW, {})
    own = seen(FULL, 120)
    memory, dropped = resumed(own, ahead, POLICY, NOW)
    assert (memory, list(dropped)) == (own, ["capacity"])
    memory, dropped = resumed(own, Learned(900.0, NOW + 3), POLICY, NOW)
    assert (memory.capacity, memory.capacity_s, dropped) == (900.0, NOW, {}), "clocks are a few seconds apart"


def test_a_rise_that_no_number_of_pods_could_serve_is_dropped_and_others_are_bounded() -> None:
    def held(rise: float, known: Learned, share: float = 1.0) -> tuple[float, list[str]]:
        memory, dropped = resumed(
            ScalingMemory(), replace(known, rise=rise, rise_s=NOW - 1), POLICY, NOW - 1, share=share
        )
        for second in (-1, 1):
            decision, memory = decide(POLICY, at(LIGHT, NOW + second), memory)
        return decision.inputs["arrivals_high"] - decision.inputs["arrivals"], list(dropped)

    most = POLICY.max_replicas * PRIOR * 1000
    assert held(1.001 * most, KNOWN) == (pytest.approx(2400 / POLICY.backlog.busy - 2400), ["rise"])
    assert held(0.999 * most, KNOWN) == (pytest.approx(POLICY.max_replicas * 700.0), [])
    assert held(1e5, KNOWN, share=0.25)[0] == pytest.approx(1e5), "of all pools with the model, and it has one in four"
    assert held(1e5, Learned()) == (pytest.approx(1e5), []), "what a pod can do is unknown"


@pytest.mark.parametrize(("factor", "is_replaced"), [(3.5, False), (4.5, True), (900.0, True), (0.2, True)])
def test_a_saturation_that_contradicts_what_another_process_measured_replaces_it(
    factor: float, is_replaced: bool
) -> None:
    memory = resumed(ScalingMemory(), Learned(700.0 * factor, NOW - 100), POLICY, NOW - 90).memory
    memory = seen(FULL, 16, seen(LIGHT, 60, memory, ago=16))
    assert (measured(memory) == pytest.approx(700.0)) == is_replaced


def test_what_this_process_has_measured_is_smoothed_and_not_replaced() -> None:
    """All pods may be slow for ten seconds, such as behind a slow disk: no reason to order four times as many."""
    slow = working(0.4, 70.0, tokens=5000.0, age_s=1.0)
    memory = seen(slow, 12, seen(FULL, 60, ago=12))
    assert 350 < (measured(memory) or 0) < 700


def test_rises_of_before_are_held_until_a_window_was_watched() -> None:
    """Bursts of 4,000 tokens/s came. A process that starts between two of them holds capacity for the next."""
    known = Learned(rise=4000.0, rise_s=NOW - 100)
    memory, held = resumed(ScalingMemory(), known, POLICY, NOW - 100).memory, []
    for second in range(-98, 300, 2):
        decision, memory = decide(POLICY, at(LIGHT, NOW + second), memory)
        held.append((second, decision.inputs["arrivals_high"]))
    for second, value in held:
        assert value == pytest.approx(2400 + 4000.0 if second < 200 else 2400 / POLICY.backlog.busy)


def test_a_silence_after_a_restart_does_not_hide_the_bursts_before() -> None:
    """As many pods as requests of late are enough; a process that saw none of these requests doesn't know how many."""
    silent = working(0.0, 0.0, count=6)
    known = replace(KNOWN, rise=3000.0, rise_s=NOW - 100)
    memory = resumed(ScalingMemory(), known, POLICY, NOW - 100).memory
    for second in range(-100, 0, 2):
        decision, memory = decide(POLICY, at(silent, NOW + second), memory)
    assert decision.inputs["need"] == math.ceil(3000.0 / 700.0)


def test_a_clock_that_goes_back_or_has_no_time_does_not_take_the_capacity_away() -> None:
    memory = seen(FULL, 60)
    for shown in (at(LIGHT, NOW - 3600), replace(LIGHT, time_s=math.nan)):
        _, after = decide(POLICY, shown, memory)
        assert Learned.of(after).capacity == pytest.approx(700.0)
    _, back = decide(POLICY, at(LIGHT, NOW - 3600), memory)
    assert back.capacity_s is not None
    assert back.capacity_s <= NOW - 3600


def test_other_engines_are_measured_anew() -> None:
    memory = without_capacity(seen(FULL, 60))
    assert Learned.of(memory).capacity is None
    slower = working(0.4, 300.0, tokens=5000.0, age_s=1.0)
    for second in range(0, 12, 2):
        _, memory = decide(POLICY, at(slower, NOW + second), memory)
    assert Learned.of(memory).capacity == pytest.approx(300.0)


@pytest.mark.parametrize(
    "given",
    [
        {"unproven_pods": 0},
        {"unproven_fraction": 1.5},
        {"unproven_period_s": -1.0},
        {"unproven_startups": 11.0},
        {"light_fraction": -0.1},
        {"light_ttft": 1.1},
    ],
)
def test_steps_that_make_no_sense_are_refused(given: dict[str, float]) -> None:
    with pytest.raises(PolicyInvalid, match=r"unproven|light"):
        RatePolicy(**given)  # type: ignore[arg-type]
