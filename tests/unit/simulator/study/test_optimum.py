"""The clairvoyant optimum has plans of one size among its plans."""

from dataclasses import replace

import pytest
from pagestream_simulator.fleet.profile import packaged_profile, read_profile
from pagestream_simulator.study.optimum import Planner
from pagestream_simulator.study.overview import table
from pagestream_simulator.study.peak import smallest_fleet
from pagestream_simulator.terms import FleetTerms, Terms
from pagestream_simulator.traces.constant import ConstantArrivals

pytestmark = pytest.mark.builds

TERMS = Terms(fleet=FleetTerms(max_engines=12))


@pytest.mark.parametrize("startup_s", [8.0, 60.0])
def test_on_constant_arrivals_no_plan_costs_more_than_the_smallest_fixed_fleet(startup_s: float) -> None:
    load = ConstantArrivals(4.0, 200, 200, seconds=300.0).load(TERMS.fleet.partitions, seed=0)
    profile = read_profile(packaged_profile())
    engines = smallest_fleet(load, profile, TERMS)
    assert engines is not None
    assert smallest_fleet(load, profile, replace(TERMS, fleet=replace(TERMS.fleet, max_engines=engines - 1))) is None
    plan = Planner(load, profile, TERMS, startup_s, seed=0).optimum(changes=0)
    assert plan.outcome.attainment >= TERMS.objective.attainment
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
