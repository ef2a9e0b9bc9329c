"""Laws on the packaged trace, the optimum, arrivals that are scaled, policies and scenarios."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from pagestream_scaling import ScalingPolicy
from pagestream_simulator import (
    SAMPLE,
    Course,
    EngineProfile,
    FixedLaw,
    FleetScenario,
    InputFileInvalidError,
    Load,
    LoadScenario,
    Outcome,
    Planner,
    Scenario,
    SettingInvalidError,
    lower_bound,
    make_law,
    packaged_profile,
    peak_factor,
    planned,
    read_policy,
    read_profile,
    read_scenario,
    read_trace,
    scale_arrivals,
    scaled_load,
    simulate,
    smallest_fleet,
)

# -- Laws, the optimum and the search on the packaged trace


pytestmark = pytest.mark.builds

SCENARIO = Scenario(
    load=LoadScenario(engines_at_peak=4), fleet=FleetScenario(initial_engines=2, max_engines=8, partitions=8)
)


@pytest.fixture(scope="module")
def profile() -> EngineProfile:
    return read_profile(packaged_profile())


@pytest.fixture(scope="module")
def load(profile: EngineProfile) -> Load:
    rows = read_trace(SAMPLE)
    return scaled_load(rows, peak_factor(rows, profile, SCENARIO), SCENARIO, 0)


def run_all(load: Load, profile: EngineProfile) -> dict[str, Outcome]:
    return {
        name: simulate(load, profile, make_law(name, SCENARIO), SCENARIO, startup_s=5.0)
        for name in ("pagestream", "hpa", "keda")
    }


def test_the_fixed_fleet_at_its_peak_attains_the_objective_and_one_engine_less_does_not(
    load: Load, profile: EngineProfile
) -> None:
    assert simulate(load, profile, FixedLaw(4), SCENARIO, startup_s=5.0).attainment >= 0.99
    assert simulate(load, profile, FixedLaw(3), SCENARIO, startup_s=5.0).attainment < 0.99


def test_the_optimum_is_the_cheapest_that_attains_and_above_its_bound(load: Load, profile: EngineProfile) -> None:
    best = Planner(load, profile, SCENARIO, 5.0, 0).optimum(40).outcome
    assert best.attainment >= 0.99
    assert lower_bound(load, profile, 0.99) < best.pod_hours
    fixed = simulate(load, profile, FixedLaw(4), SCENARIO, startup_s=5.0)
    for outcome in (fixed, *run_all(load, profile).values()):
        assert outcome.attainment < 0.99 or outcome.pod_hours > best.pod_hours


def test_every_request_ends_under_every_law_and_runs_repeat_by_seed(load: Load, profile: EngineProfile) -> None:
    first = run_all(load, profile)
    assert all(outcome.unfinished == 0 and outcome.requests == len(load) for outcome in first.values())
    assert first == run_all(load, profile)


def test_pods_cost_from_their_order_to_their_end(load: Load, profile: EngineProfile) -> None:
    outcome = simulate(load, profile, FixedLaw(3), SCENARIO, startup_s=5.0)
    assert outcome.pod_hours == pytest.approx(3 * load.duration_s / 3600)
    plan = planned(np.array([1, 1, 1, 3, 3, 1, *[1] * 40]), 5.0)
    assert [plan.planned(at) for at in (0.0, 9.9, 10.0, 15.0, 24.9, 25.0)] == [1, 1, 3, 3, 3, 1]
    costs = simulate(load, profile, plan, SCENARIO, startup_s=5.0).pod_hours * 3600
    drained = costs - load.duration_s - 2 * 15.0  # two pods ordered at 10 s, drained from 25 s on
    assert 0 <= drained < 2 * 3.0  # at a whole second, and after their running step


def test_recording_the_course_changes_no_outcome(load: Load, profile: EngineProfile) -> None:
    courses: list[Course] = []
    seen = simulate(load, profile, make_law("pagestream", SCENARIO), SCENARIO, startup_s=5.0, on_course=courses.append)
    assert seen == simulate(load, profile, make_law("pagestream", SCENARIO), SCENARIO, startup_s=5.0)
    course = courses[0]
    assert (course.ready <= course.pods).all()
    assert ((course.kv_utilization >= 0) & (course.kv_utilization <= 1)).all()
    assert np.mean(course.ttft_s <= 2.0) == seen.attainment


def test_a_scaled_trace_has_copies_near_the_first_arrivals() -> None:
    rows = read_trace(SAMPLE)
    load = scale_arrivals(rows, 3.5, jitter_s=2.0, context_tokens=1024, partitions=8, seed=1)
    assert len(load) == pytest.approx(3.5 * len(rows), rel=0.05)
    assert (np.diff(load.arrival_s) >= 0).all()
    assert ((load.prompt_tokens + load.output_tokens) <= 1024).all()
    assert set(load.partition) <= set(range(8))
    times = np.array([row.arrival_s for row in rows])
    nearest = np.abs(load.arrival_s[:, None] - times[None, :]).min(axis=1)
    assert nearest.max() <= 2.0
    once = scale_arrivals(rows, 1.0, jitter_s=2.0, context_tokens=10**6, partitions=8, seed=1)
    assert np.allclose(once.arrival_s, times)
    assert list(once.prompt_tokens) == [row.input_tokens for row in rows]


# -- The clairvoyant optimum has plans of one size among its plans


TWELVE = Scenario(fleet=FleetScenario(max_engines=12))


@pytest.mark.parametrize("startup_s", [8.0, 60.0])
def test_on_constant_arrivals_no_plan_costs_more_than_the_smallest_fixed_fleet(startup_s: float) -> None:
    rng = np.random.default_rng(0)
    count, partitions = 1200, TWELVE.fleet.partitions
    lengths = np.full(count, 200, dtype=np.int32)
    partition = rng.integers(0, partitions, count, dtype=np.int32)
    load = Load(np.sort(rng.uniform(0.0, 300.0, count)), lengths, lengths, partition)
    profile = read_profile(packaged_profile())
    engines = smallest_fleet(load, profile, TWELVE)
    assert engines is not None
    assert smallest_fleet(load, profile, replace(TWELVE, fleet=replace(TWELVE.fleet, max_engines=engines - 1))) is None
    plan = Planner(load, profile, TWELVE, startup_s, seed=0).optimum(changes=0)
    assert plan.outcome.attainment >= TWELVE.objective.attainment
    assert plan.outcome.pod_hours <= engines * load.duration_s / 3600 + 1e-6


def test_a_policy_file_changes_only_what_it_names(tmp_path: Path) -> None:
    path = tmp_path / "policy.json"
    path.write_text('{"max_replicas": 3, "backlog": {"busy": 0.5}}')
    policy = read_policy(path)
    assert (policy.max_replicas, policy.backlog.busy) == (3, 0.5)
    assert policy.panic == ScalingPolicy().panic
    path.write_text('{"backlog": {"bussy": 0.5}}')
    with pytest.raises(SettingInvalidError, match="bussy"):
        read_policy(path)
    path.write_text('{"backlog": {"busy": 5}}')
    with pytest.raises(SettingInvalidError, match="busy"):
        read_policy(path)


def test_the_studys_terms_can_be_read_and_wrong_names_are_refused(tmp_path: Path) -> None:
    scenario = read_scenario(Path(__file__).parents[2] / "docs/benchmarks/autoscaling-terms.toml")
    assert scenario.objective == Scenario().objective
    assert scenario.load.tune.endswith(".csv")
    assert scenario.load.report.endswith(".csv")
    assert scenario.load.tune != scenario.load.report
    (tmp_path / "t.toml").write_text("[objective]\nttft = 1")
    with pytest.raises(InputFileInvalidError, match="ttft"):
        read_scenario(tmp_path / "t.toml")
