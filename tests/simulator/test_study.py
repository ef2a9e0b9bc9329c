"""What a study is made of: laws on the packaged trace, the optimum, the search, measured steps, terms and tables."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from pagestream_scaling import PolicyInvalid, ScalingPolicy
from pagestream_simulator import (
    Course,
    FleetTerms,
    InputFileInvalidError,
    LoadTerms,
    Outcome,
    SettingInvalidError,
    Terms,
    read_terms,
    simulate,
)
from pagestream_simulator.engine import StepContents
from pagestream_simulator.fleet import EngineProfile, StepCost, packaged_profile, read_profile
from pagestream_simulator.laws import FixedLaw
from pagestream_simulator.study.measure import MeasuredStep, fit, residuals
from pagestream_simulator.study.optimum import Planner, lower_bound, planned
from pagestream_simulator.study.overview import SYNTHETIC, TRACES, Overview, restarts_table, starts_table, table
from pagestream_simulator.study.peak import peak_factor, scaled_load, smallest_fleet
from pagestream_simulator.study.search import search
from pagestream_simulator.study.spaces import Setting, read_policy, spaces
from pagestream_simulator.study.tables import tables
from pagestream_simulator.traces import SAMPLE, ConstantArrivals, Load, read_trace, scale_arrivals

# -- Laws, the optimum and the search on the packaged trace


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


# -- The clairvoyant optimum has plans of one size among its plans


TWELVE = Terms(fleet=FleetTerms(max_engines=12))


@pytest.mark.parametrize("startup_s", [8.0, 60.0])
def test_on_constant_arrivals_no_plan_costs_more_than_the_smallest_fixed_fleet(startup_s: float) -> None:
    load = ConstantArrivals(4.0, 200, 200, seconds=300.0).load(TWELVE.fleet.partitions, seed=0)
    profile = read_profile(packaged_profile())
    engines = smallest_fleet(load, profile, TWELVE)
    assert engines is not None
    assert smallest_fleet(load, profile, replace(TWELVE, fleet=replace(TWELVE.fleet, max_engines=engines - 1))) is None
    plan = Planner(load, profile, TWELVE, startup_s, seed=0).optimum(changes=0)
    assert plan.outcome.attainment >= TWELVE.objective.attainment
    assert plan.outcome.pod_hours <= engines * load.duration_s / 3600 + 1e-6


def test_the_overview_has_a_row_for_each_law_with_means_over_seeds() -> None:
    outcome = {"attainment": 0.99, "pod_hours": 4.0, "pods_up": 3}
    load, kept = "azure_llm_2023_code.csv", {}
    for seed in Terms().load.seeds:
        kept[f"fleet: {load} seed {seed}"] = {"engines": 20 + seed}
        for startup in ("8", "60"):
            place = f"{load} seed {seed} startup {startup}"
            kept |= {f"fixed: {place}": outcome, f"optimum: {place}": outcome | {"pod_hours": 2.0}}
            kept[f"pagestream: {place}"] = outcome | {"attainment": 0.98 + 0.01 * (seed > 0)}
    rows = [line for line in table(kept, Terms()) if line.startswith("| code |")]
    assert len(rows) == 3
    assert "fixed fleet of 20, 21, 22 | 99.00 / 99.00 | 4.00 | 2.00 | 3" in rows[0]
    assert "pagestream | 98.67 / 98.00" in rows[2]


def test_the_overview_begins_with_enough_engines_and_restarts(profile: EngineProfile) -> None:
    """On a load of a minute: what it keeps can be resumed, and has a row in each table."""
    rows = read_trace(SAMPLE)
    traces = dict.fromkeys(TRACES, rows) | {SYNTHETIC: rows}
    terms = replace(TERMS, load=replace(TERMS.load, seeds=(0,)))
    kept: dict[str, object] = {f"factor {name}": {"factor": 2.0} for name in traces}
    saved: list[int] = []
    study = Overview(terms, profile, traces, kept, lambda content: saved.append(len(content)))
    study.run([SYNTHETIC])
    assert saved == sorted(set(saved))
    study.run([SYNTHETIC])
    assert len(saved) == len(kept) - len(traces)
    for made, cells in ((table, 10), (starts_table, 5), (restarts_table, 7)):
        lines = [line for line in made(kept, terms) if line.startswith("| Mooncake, synthetic")]
        assert lines
        assert {line.count("|") - 1 for line in lines} == {cells}
    restarts = [found for name, found in kept.items() if name.startswith("restart")]
    assert len(restarts) == 6
    assert all(0 <= found["late_restarted"] <= 1 for found in restarts if isinstance(found, dict))


COST = StepCost(0.01, 0.0005, 1e-7, 0.0002, 1e-6)


def test_fit_recovers_the_costs_of_exact_steps() -> None:
    contents = [StepContents(p, p * p // 2, d, d * 100) for p in (0, 50, 400) for d in (0, 1, 20, 64) if p or d]
    exact = [MeasuredStep(each, each.seconds(COST)) for each in contents]
    found = fit(exact)
    assert max(abs(step.contents.seconds(found) / step.seconds - 1) for step in exact) < 1e-9
    assert residuals(found, exact)["relative_error_p90"] < 1e-9


def test_fit_gives_no_negative_cost() -> None:
    steps = [MeasuredStep(StepContents(0, 0, d, d * 50), 0.02 - 0.0001 * d) for d in range(1, 40)]
    found = fit(steps)
    assert found.decode_s == found.decode_context_s == 0
    assert found.fixed_s > 0


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


def test_every_value_of_a_space_makes_a_law_or_is_refused() -> None:
    for space in spaces(Terms()).values():
        assert set(space.default) == set(space.values)
        refused = set()
        for name, values in space.values.items():
            for value in values:
                try:
                    space.make(dict(space.default) | {name: value})
                except PolicyInvalid:
                    refused.add(name)
        assert refused <= {"kv_utilization.target", "kv_utilization.low"}  # low must lie below target


OUTCOME = {"attainment": 0.99, "ttft_p50_s": 0.2, "ttft_p99_s": 2.0, "pod_hours": 4.0, "pods_up": 3}


def test_each_label_has_a_row_with_the_mean_and_names_missing_seeds() -> None:
    other = OUTCOME | {"attainment": 0.97, "pod_hours": 8.0}
    kept = {
        f"reference t.csv seed {seed} startup 8": {
            "requests": 10,
            "fixed": OUTCOME,
            "optimum": OUTCOME,
            "lower_bound_pod_hours": 1.0,
        }
        for seed in (0, 1)
    }
    kept |= {f"hpa tuned on t.csv: t.csv seed {seed} startup 8": each for seed, each in ((0, OUTCOME), (1, other))}
    kept |= {"pagestream default: t.csv seed 1 startup 8": OUTCOME}
    kept |= {"earlier pagestream default: t.csv seed 0 startup 8": other}
    text = "\n".join(tables(kept))
    assert "| hpa tuned on t.csv | 98.00 % (97.00 %) | 0.20 s | 2.00 s | 6.00 | 1.50 | 3 |" in text
    assert "| pagestream default (seed 1) | 99.00 % (99.00 %) |" in text
    assert "| earlier pagestream default (seed 0) | 97.00 % (97.00 %) | 0.20 s | 2.00 s | 8.00 | 2.00 | 3 |" in text
    assert "keda" not in text


def test_the_studys_terms_can_be_read_and_wrong_names_are_refused(tmp_path: Path) -> None:
    terms = read_terms(Path(__file__).parents[2] / "docs/benchmarks/autoscaling-terms.toml")
    assert terms.objective == Terms().objective
    assert terms.load.tune.endswith(".csv")
    assert terms.load.report.endswith(".csv")
    assert terms.load.tune != terms.load.report
    (tmp_path / "t.toml").write_text("[objective]\nttft = 1")
    with pytest.raises(InputFileInvalidError, match="ttft"):
        read_terms(tmp_path / "t.toml")
