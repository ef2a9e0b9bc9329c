"""Laws, the optimum and the search on the packaged trace."""

import numpy as np
import pytest
from pagestream_simulator.fleet.profile import EngineProfile, packaged_profile, read_profile
from pagestream_simulator.laws import FixedLaw
from pagestream_simulator.simulation import Course, Outcome, simulate
from pagestream_simulator.study.optimum import Planner, lower_bound, planned
from pagestream_simulator.study.peak import peak_factor, scaled_load
from pagestream_simulator.study.search import search
from pagestream_simulator.study.spaces import Setting, spaces
from pagestream_simulator.terms import FleetTerms, LoadTerms, Terms
from pagestream_simulator.traces.files import SAMPLE, read_trace
from pagestream_simulator.traces.load import Load, scale_arrivals

pytestmark = pytest.mark.builds

TERMS = Terms(load=LoadTerms(engines_at_peak=4), fleet=FleetTerms(initial_engines=2, max_engines=8, partitions=8))


@pytest.fixture(scope="module")
def profile() -> EngineProfile:
    return read_profile(packaged_profile())


@pytest.fixture(scope="module")
def load(profile: EngineProfile) -> Load:
    rows = read_trace(SAMPLE)
    return scaled_load(rows, peak_factor(rows, profile, TERMS), TERMS, 0)


def run_all(load: Load, profile: EngineProfile) -> dict[str, Outcome]:
    return {
        name: simulate(load, profile, space.make(space.default), TERMS, startup_s=5.0)
        for name, space in spaces(TERMS).items()
    }


def test_the_fixed_fleet_at_its_peak_attains_the_objective_and_one_engine_less_does_not(
    load: Load, profile: EngineProfile
) -> None:
    assert simulate(load, profile, FixedLaw(4), TERMS, startup_s=5.0).attainment >= 0.99
    assert simulate(load, profile, FixedLaw(3), TERMS, startup_s=5.0).attainment < 0.99


def test_the_optimum_is_the_cheapest_that_attains_and_above_its_bound(load: Load, profile: EngineProfile) -> None:
    best = Planner(load, profile, TERMS, 5.0, 0).optimum(40).outcome
    assert best.attainment >= 0.99
    assert lower_bound(load, profile, 0.99) < best.pod_hours
    fixed = simulate(load, profile, FixedLaw(4), TERMS, startup_s=5.0)
    for outcome in (fixed, *run_all(load, profile).values()):
        assert outcome.attainment < 0.99 or outcome.pod_hours > best.pod_hours


def test_every_request_ends_under_every_law_and_runs_repeat_by_seed(load: Load, profile: EngineProfile) -> None:
    first = run_all(load, profile)
    assert all(outcome.unfinished == 0 and outcome.requests == len(load) for outcome in first.values())
    assert first == run_all(load, profile)


def test_pods_cost_from_their_order_to_their_end(load: Load, profile: EngineProfile) -> None:
    outcome = simulate(load, profile, FixedLaw(3), TERMS, startup_s=5.0)
    assert outcome.pod_hours == pytest.approx(3 * load.duration_s / 3600)
    plan = planned(np.array([1, 1, 1, 3, 3, 1, *[1] * 40]), 5.0)
    assert [plan.planned(at) for at in (0.0, 9.9, 10.0, 15.0, 24.9, 25.0)] == [1, 1, 3, 3, 3, 1]
    costs = simulate(load, profile, plan, TERMS, startup_s=5.0).pod_hours * 3600
    drained = costs - load.duration_s - 2 * 15.0  # two pods ordered at 10 s, drained from 25 s on
    assert 0 <= drained < 2 * 3.0  # at a whole second, and after their running step


def test_recording_the_course_changes_no_outcome(load: Load, profile: EngineProfile) -> None:
    space = spaces(TERMS)["pagestream"]
    courses: list[Course] = []
    seen = simulate(load, profile, space.make(space.default), TERMS, startup_s=5.0, on_course=courses.append)
    assert seen == simulate(load, profile, space.make(space.default), TERMS, startup_s=5.0)
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


def test_a_search_repeats_by_seed_and_returns_the_best_first() -> None:
    space = spaces(TERMS)["hpa"]

    def attempt(setting: Setting) -> list[Outcome]:
        attained = 0.99 if setting["target"] <= 0.5 else 0.5
        return [Outcome(1, attained, 0.0, 0.0, 1 + setting["target"], 0, 0, 0)]

    trials = search(space, attempt, trials=30, attainment=0.99, seed=0)
    assert len(trials) == 30
    assert trials == search(space, attempt, trials=30, attainment=0.99, seed=0)
    assert trials[0].setting["target"] == min(trial.setting["target"] for trial in trials)
    assert trials[-1].outcomes[0].attainment == 0.5
    assert any(trial.setting == space.default for trial in trials)
