"""The autoscaling study: `python -m research.autoscaling.study --terms FILE --traces DIR --output FILE`.

It tunes every law on one trace of the scenario and judges all of them on the other, then the other way round. The
second way is not part of the goal: it shows how much the choice of the trace matters. Results are written as they come,
and an interrupted run resumes after the last one.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from pagestream_simulator import FixedLaw
from pagestream_simulator.load import Load, TraceRow, read_trace
from pagestream_simulator.optimum import Planner, lower_bound, peak_factor, scaled_load
from pagestream_simulator.profile import EngineProfile, packaged_profile, read_profile
from pagestream_simulator.scenario import Scenario, read_scenario
from pagestream_simulator.simulation import Outcome, simulate

from research.autoscaling.search import search
from research.autoscaling.spaces import Setting, Space, spaces

PLAN_CHANGES = 0
"""Changes of a plan to try for the optimum."""
KEPT_TRIALS = 5
"""Best trials of a search that are written."""


class Study:
    """Runs what isn't in `kept` yet, and calls `keep` with all results after each one."""

    def __init__(
        self,
        scenario: Scenario,
        profile: EngineProfile,
        traces: dict[str, Sequence[TraceRow]],
        kept: dict[str, Any],
        keep: Callable[[dict[str, Any]], None],
    ) -> None:
        self._terms, self._profile, self._traces = scenario, profile, traces
        self._kept, self._keep = kept, keep
        self._loads: dict[tuple[str, int], Load] = {}

    def run(self) -> None:
        """Run both ways, the scenario's own first."""
        tune, report = self._terms.load.tune, self._terms.load.report
        for chosen_on, judged_on in ((tune, report), (report, tune)):
            for law in spaces(self._terms).values():
                self._once(f"search {chosen_on} {law.name}", lambda law=law, on=chosen_on: self._search(law, on))  # type: ignore[misc]
            for trace in (judged_on, chosen_on):
                for seed in self._terms.load.seeds if trace == judged_on else self._terms.load.seeds[:1]:
                    for startup_s in self._terms.fleet.startup_s:
                        self._judge(chosen_on, trace, seed, startup_s)

    def _judge(self, chosen_on: str, trace: str, seed: int, startup_s: float) -> None:
        where = f"{trace} seed {seed} startup {startup_s:g}"
        self._once(f"reference {where}", lambda: self._references(trace, seed, startup_s))
        for space in spaces(self._terms).values():
            setting = self._kept[f"search {chosen_on} {space.name}"]["best"]["setting"]
            for label, given in (
                (f"{space.name} tuned on {chosen_on}", setting),
                (f"{space.name} default", space.default),
            ):
                self._once(
                    f"{label}: {where}",
                    lambda given=given, space=space: asdict(  # type: ignore[misc]
                        self._attempt(space, given, trace, seed, startup_s)
                    ),
                )

    def _once(self, name: str, work: Callable[[], dict[str, Any]]) -> None:
        if name not in self._kept:
            self._kept[name] = work()
            print(f"{name}: {json.dumps(self._kept[name])[:300]}", file=sys.stderr, flush=True)
            self._keep(self._kept)

    def _search(self, space: Space, trace: str) -> dict[str, Any]:
        def attempt(setting: Setting) -> list[Outcome]:
            seed = self._terms.load.seeds[0]
            return [self._attempt(space, setting, trace, seed, each) for each in self._terms.fleet.startup_s]

        scenario = self._terms
        trials = search(
            space,
            attempt,
            trials=scenario.search.trials,
            attainment=scenario.objective.attainment,
            seed=scenario.search.seed,
        )
        return {"best": asdict(trials[0]), "next": [asdict(trial) for trial in trials[1:KEPT_TRIALS]]}

    def _references(self, trace: str, seed: int, startup_s: float) -> dict[str, Any]:
        load, scenario = self._load(trace, seed), self._terms
        fixed = FixedLaw(scenario.load.engines_at_peak)
        plan = Planner(load, self._profile, scenario, startup_s, seed).optimum(PLAN_CHANGES)
        return {
            "requests": len(load),
            "factor": self._factor(trace),
            "fixed": asdict(simulate(load, self._profile, fixed, scenario, startup_s=startup_s, seed=seed)),
            "optimum": asdict(plan.outcome),
            "lower_bound_pod_hours": lower_bound(load, self._profile, scenario.objective.attainment),
        }

    def _attempt(self, space: Space, setting: Setting, trace: str, seed: int, startup_s: float) -> Outcome:
        law = space.make(setting)
        return simulate(self._load(trace, seed), self._profile, law, self._terms, startup_s=startup_s, seed=seed)

    def _factor(self, trace: str) -> float:
        name = f"factor {trace}"
        self._once(name, lambda: {"factor": peak_factor(self._traces[trace], self._profile, self._terms)})
        return float(self._kept[name]["factor"])

    def _load(self, trace: str, seed: int) -> Load:
        if (trace, seed) not in self._loads:
            self._loads[trace, seed] = scaled_load(self._traces[trace], self._factor(trace), self._terms, seed)
        return self._loads[trace, seed]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the study."""
    parser = argparse.ArgumentParser(description="Tunes and compares scaling laws by the scenario in a file.")
    parser.add_argument("--terms", type=Path, required=True, metavar="FILE")
    parser.add_argument("--traces", type=Path, required=True, metavar="DIR", help="folder of the scenario's traces")
    parser.add_argument("--profile", type=Path, default=packaged_profile(), metavar="FILE", help="engine profile")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="JSON; an existing file is resumed")
    given = parser.parse_args(arguments)
    scenario = read_scenario(given.terms)
    if scenario.fleet.startup_cluster_test_s > 0:
        measured = (scenario.fleet.startup_cluster_test_s, *scenario.fleet.startup_s[1:])
        scenario = replace(scenario, fleet=replace(scenario.fleet, startup_s=measured))
    traces: dict[str, Sequence[TraceRow]] = {
        name: read_trace(str(given.traces / name)) for name in (scenario.load.tune, scenario.load.report)
    }
    kept = json.loads(given.output.read_text()) if given.output.exists() else {}
    study = Study(scenario, read_profile(given.profile), traces, kept, lambda all_: _write(given.output, all_))
    study.run()
    return 0


def _write(path: Path, content: dict[str, Any]) -> None:
    made = path.with_suffix(".part")
    made.write_text(json.dumps(content, indent=1) + "\n")
    made.replace(path)


if __name__ == "__main__":
    sys.exit(main())
