"""The autoscaling study: searches, loads by rule, measured steps, and the tables."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from pagestream_scaling import PolicyInvalid
from pagestream_simulator import (
    SAMPLE,
    EngineProfile,
    FleetScenario,
    LoadScenario,
    Outcome,
    Scenario,
    StepContents,
    StepCost,
    TraceRow,
    packaged_profile,
    read_profile,
    read_trace,
)
from pagestream_simulator.laws import Setting
from pagestream_simulator.load import sample_path, write_csv

from research.autoscaling.loads import ConstantArrivals, MixedArrivals, synthetic_rows
from research.autoscaling.measure import MeasuredStep, fit, residuals
from research.autoscaling.overview import SYNTHETIC, TRACES, Overview, restarts_table, starts_table, table
from research.autoscaling.search import search
from research.autoscaling.spaces import spaces
from research.autoscaling.tables import tables
from research.sample_trace import REQUESTS, sample_rows

SCENARIO = Scenario(
    load=LoadScenario(engines_at_peak=4), fleet=FleetScenario(initial_engines=2, max_engines=8, partitions=8)
)


@pytest.fixture(scope="module")
def profile() -> EngineProfile:
    return read_profile(packaged_profile())


def test_a_search_repeats_by_seed_and_returns_the_best_first() -> None:
    space = spaces(SCENARIO)["hpa"]

    def attempt(setting: Setting) -> list[Outcome]:
        attained = 0.99 if setting["target"] <= 0.5 else 0.5
        return [Outcome(1, attained, 0.0, 0.0, 1 + setting["target"], 0, 0, 0)]

    trials = search(space, attempt, trials=30, attainment=0.99, seed=0)
    assert len(trials) == 30
    assert trials == search(space, attempt, trials=30, attainment=0.99, seed=0)
    assert trials[0].setting["target"] == min(trial.setting["target"] for trial in trials)
    assert trials[-1].outcomes[0].attainment == 0.5
    assert any(trial.setting == space.default for trial in trials)


def test_the_overview_has_a_row_for_each_law_with_means_over_seeds() -> None:
    outcome = {"attainment": 0.99, "pod_hours": 4.0, "pods_up": 3}
    load, kept = "azure_llm_2023_code.csv", {}
    for seed in Scenario().load.seeds:
        kept[f"fleet: {load} seed {seed}"] = {"engines": 20 + seed}
        for startup in ("8", "60"):
            place = f"{load} seed {seed} startup {startup}"
            kept |= {f"fixed: {place}": outcome, f"optimum: {place}": outcome | {"pod_hours": 2.0}}
            kept[f"pagestream: {place}"] = outcome | {"attainment": 0.98 + 0.01 * (seed > 0)}
    rows = [line for line in table(kept, Scenario()) if line.startswith("| code |")]
    assert len(rows) == 3
    assert "fixed fleet of 20, 21, 22 | 99.00 / 99.00 | 4.00 | 2.00 | 3" in rows[0]
    assert "pagestream | 98.67 / 98.00" in rows[2]


def test_the_overview_begins_with_enough_engines_and_restarts(profile: EngineProfile) -> None:
    """On a load of a minute: what it keeps can be resumed, and has a row in each table."""
    rows = read_trace(SAMPLE)
    traces = dict.fromkeys(TRACES, rows) | {SYNTHETIC: rows}
    scenario = replace(SCENARIO, load=replace(SCENARIO.load, seeds=(0,)))
    kept: dict[str, object] = {f"factor {name}": {"factor": 2.0} for name in traces}
    saved: list[int] = []
    study = Overview(scenario, profile, traces, kept, lambda content: saved.append(len(content)))
    study.run([SYNTHETIC])
    assert saved == sorted(set(saved))
    study.run([SYNTHETIC])
    assert len(saved) == len(kept) - len(traces)
    for made, cells in ((table, 10), (starts_table, 5), (restarts_table, 7)):
        lines = [line for line in made(kept, scenario) if line.startswith("| Mooncake, synthetic")]
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


def test_every_value_of_a_space_makes_a_law_or_is_refused() -> None:
    for space in spaces(Scenario()).values():
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


def rows_of(*lengths: tuple[int, int]) -> list[TraceRow]:
    return [TraceRow(float(i), *length) for i, length in enumerate(lengths)]


def test_the_packaged_sample_is_what_its_generator_makes(tmp_path: Path) -> None:
    write_csv(sample_rows(), tmp_path / "again.csv")
    assert (tmp_path / "again.csv").read_bytes() == sample_path().read_bytes()
    rows = read_trace("sample")
    assert len(rows) == REQUESTS
    assert rows[0].arrival_s == 0.0
    assert len({row.input_tokens for row in rows}) > REQUESTS / 2


def test_the_sample_depends_on_its_seed() -> None:
    assert list(sample_rows(20, seed=1)) == list(sample_rows(20, seed=1))
    assert list(sample_rows(20, seed=1)) != list(sample_rows(20, seed=2))


def test_the_stand_in_for_mooncakes_synthetic_trace_has_its_rate_and_lengths() -> None:
    rows = synthetic_rows()
    assert rows == synthetic_rows()
    assert rows != synthetic_rows(seed=1)
    assert len(rows) / rows[-1].arrival_s == pytest.approx(3.9, rel=0.05)
    assert np.mean([row.input_tokens for row in rows]) == pytest.approx(15_325, rel=0.25)
    assert np.mean([row.output_tokens for row in rows]) == pytest.approx(149, rel=0.25)


CHATS, CODE = rows_of(*[(100, 50)] * 10), rows_of(*[(900, 10)] * 10)


def test_mixed_arrivals_have_the_lengths_of_both_traces() -> None:
    load = MixedArrivals(20.0, 0.5).load(CHATS, CODE, context_tokens=1024, partitions=4, seed=0)
    assert len(load) == pytest.approx(20 * 1800, rel=0.02)
    assert (np.diff(load.arrival_s) >= 0).all()
    assert np.mean(load.prompt_tokens == 900) == pytest.approx(0.3, abs=0.02)
    assert set(load.partition) == {0, 1, 2, 3}
    again = MixedArrivals(20.0, 0.5).load(CHATS, CODE, context_tokens=1024, partitions=4, seed=0)
    assert (again.arrival_s == load.arrival_s).all()


def test_a_day_rises_falls_and_has_bursts() -> None:
    def by_minute(*, has_bursts: bool) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
        day = MixedArrivals(4.0, 2.0, swing=5.0, has_bursts=has_bursts)
        load = day.load(CHATS, CODE, context_tokens=1024, partitions=4, seed=3)
        return np.bincount((load.arrival_s // 60).astype(int), minlength=120)

    calm, burst = by_minute(has_bursts=False), by_minute(has_bursts=True)
    assert calm[:5].mean() == pytest.approx(4 * 60, rel=0.1)
    assert calm[57:63].mean() == pytest.approx(5 * 4 * 60, rel=0.1)
    assert burst.sum() > calm.sum()
    assert (burst / calm).max() > 1.3


def test_constant_arrivals_are_equal_requests_at_the_rate() -> None:
    load = ConstantArrivals(4.0, 200, 100, seconds=300.0).load(8, seed=0)
    assert len(load) == pytest.approx(1200, rel=0.1)
    assert set(load.prompt_tokens) == {200}
    assert set(load.output_tokens) == {100}
