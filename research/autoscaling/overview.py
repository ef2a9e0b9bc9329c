"""One table of all loads: `python -m research.autoscaling.overview --traces DIR --output FILE`.

It runs four traces, constant arrivals, a mix of requests and a day with bursts, each with the scenario's seeds and
start-up times, through the best fixed fleet, the optimum, Pagestream's law with its defaults and HPA's with its own and
with the best that a search on the conversations found; then Pagestream's law from a start with as many engines as the
fixed fleet has, and with restarts of its operator. Results are written as they come, and an interrupted run resumes
after the last one; without `--traces` a file is printed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from fractions import Fraction
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from pagestream_simulator.laws import FixedLaw, Law, PagestreamLaw, RestartedLaw, Setting, default_policy, make_law
from pagestream_simulator.load import Load, TraceRow, read_trace
from pagestream_simulator.optimum import Planner, peak_factor, scaled_load, smallest_fleet
from pagestream_simulator.profile import EngineProfile, packaged_profile, read_profile
from pagestream_simulator.scenario import Scenario
from pagestream_simulator.simulation import Floats, simulate

from research.autoscaling.loads import ConstantArrivals, MixedArrivals, synthetic_rows

CODE, CONVERSATIONS = "azure_llm_2023_code.csv", "azure_llm_2023_conv.csv"
TRACES = (CODE, CONVERSATIONS, "mooncake_conversation.jsonl")
SYNTHETIC = "mooncake_synthetic.jsonl"
"""Made by rule where the folder of traces doesn't have it."""
HPA_TUNED: Setting = {
    "target": 0.4,
    "tolerance": 0.05,
    "up.stabilization_s": 15.0,
    "down.stabilization_s": 120.0,
    "down.percent": 5.0,
    "down.period_s": 60.0,
}
"""The best of 100 settings that were searched on the conversations (docs/benchmarks/autoscaling.md)."""
CONSTANT = (ConstantArrivals(8.0, 200, 200), ConstantArrivals(1.0, 200, 800))
MIXED = (MixedArrivals(45.0, 1.0), MixedArrivals(6.0, 4.0, swing=5.0, has_bursts=True))
LOADS = (*TRACES, SYNTHETIC, *(each.name for each in CONSTANT), *(each.name for each in MIXED))
RESTARTS = (Fraction(1, 3), Fraction(2, 3), Fraction(5, 6))
"""Parts of a load after which the operator restarts, each in a run of its own."""
AFTER_S = 300.0
"""Seconds after a restart whose requests are counted."""
_LAWS: Mapping[str, tuple[str, Setting]] = {
    "pagestream": ("pagestream", {}),
    "hpa": ("hpa", {}),
    "hpa tuned": ("hpa", HPA_TUNED),
}
"""By label: the law, and what differs from its defaults."""
_SHORT = {CODE: "code", CONVERSATIONS: "conversations"} | {
    "mooncake_conversation.jsonl": "Mooncake",
    SYNTHETIC: "Mooncake, synthetic",
}
"""What tables call the traces."""
_HEAD = (
    "| load | law | 8 s: % attained | pod-hours | ratio | orders | 60 s: % attained | pod-hours | ratio | orders |\n"
    "|---|---|---|---|---|---|---|---|---|---|"
)
Kept = dict[str, Any]


class Overview:
    """Runs what isn't in `kept` yet, and calls `keep` after each result."""

    def __init__(
        self,
        scenario: Scenario,
        profile: EngineProfile,
        traces: Mapping[str, Sequence[TraceRow]],
        kept: Kept,
        keep: Callable[[Kept], None],
    ) -> None:
        self._terms, self._profile, self._traces = scenario, profile, traces
        self._kept, self._keep = kept, keep

    def run(self, loads: Sequence[str] = LOADS) -> None:
        """Run each load through each law, one seed after the other."""
        for seed in self._terms.load.seeds:
            for name in loads:
                load = self._load(name, seed)
                self._judge(name, load, seed)
                if seed == self._terms.load.seeds[0]:  # one seed is enough for what is compared run by run
                    self._start(name, load, seed)
                    self._restart(name, load, seed)

    def _load(self, name: str, seed: int) -> Load:
        fleet = self._terms.fleet
        for constant in CONSTANT:
            if constant.name == name:
                return constant.load(fleet.partitions, seed)
        for mixed in MIXED:
            if mixed.name == name:
                traces, context = (self._traces[CONVERSATIONS], self._traces[CODE]), self._terms.load.context_tokens
                return mixed.load(*traces, context_tokens=context, partitions=fleet.partitions, seed=seed)
        return scaled_load(self._traces[name], self._factor(name), self._terms, seed)

    def _judge(self, name: str, load: Load, seed: int) -> None:
        place = f"{name} seed {seed}"
        self._once(f"fleet: {place}", lambda: self._fleet(load, seed))
        for startup_s in self._terms.fleet.startup_s:
            where = f"{place} startup {startup_s:g}"
            self._once(f"fixed: {where}", lambda: self._kept[f"fleet: {place}"]["outcome"])
            self._once(f"optimum: {where}", lambda s=startup_s: self._optimum(load, seed, s))  # type: ignore[misc]
            for label, (law, changes) in _LAWS.items():
                self._once(
                    f"{label}: {where}",
                    lambda law=law, changes=changes, s=startup_s: self._attempt(  # type: ignore[misc]
                        law, changes, load, seed, s
                    ),
                )

    def _start(self, name: str, load: Load, seed: int) -> None:
        """Run Pagestream's law from a pool that has all engines that the load needs, and was never short of one."""
        engines = self._kept[f"fleet: {name} seed {seed}"]["engines"]
        scenario = replace(self._terms, fleet=replace(self._terms.fleet, initial_engines=engines))
        for startup_s in self._terms.fleet.startup_s:
            self._once(
                f"started with enough: {name} seed {seed} startup {startup_s:g}",
                lambda s=startup_s: asdict(  # type: ignore[misc]
                    simulate(load, self._profile, self._law(), scenario, startup_s=s, seed=seed)
                ),
            )

    def _restart(self, name: str, load: Load, seed: int) -> None:
        """Count late requests of the minutes after a restart, with it and without it."""
        for startup_s in self._terms.fleet.startup_s:
            place = f"{name} seed {seed} startup {startup_s:g}"
            late = cache(partial(self._late, load, startup_s, seed))
            for at in RESTARTS:
                self._once(f"restart at {at}: {place}", partial(self._after, load, float(at) * load.duration_s, late))

    def _after(self, load: Load, at_s: float, late: Callable[[float | None], npt.NDArray[np.bool_]]) -> Kept:
        after = (load.arrival_s >= at_s) & (load.arrival_s < at_s + AFTER_S)
        shares = {"late": late(None), "late_restarted": late(at_s)}
        return {"requests": int(after.sum()), **{key: float(np.mean(each[after])) for key, each in shares.items()}}

    def _late(self, load: Load, startup_s: float, seed: int, restart_s: float | None) -> npt.NDArray[np.bool_]:
        """Return of each request whether it missed the objective."""
        law: Law = self._law() if restart_s is None else RestartedLaw(self._law(), restart_s)
        found: list[Floats] = []
        simulate(load, self._profile, law, self._terms, startup_s=startup_s, seed=seed, on_ttft=found.append)
        return found[0] > self._terms.objective.ttft_s

    def _law(self) -> PagestreamLaw:
        return PagestreamLaw(default_policy(self._terms), self._terms.signals.decide_s)

    def _once(self, name: str, work: Callable[[], Kept]) -> None:
        if name not in self._kept:
            self._kept[name] = work()
            print(f"{name}: {json.dumps(self._kept[name])[:200]}", file=sys.stderr, flush=True)
            self._keep(self._kept)

    def _factor(self, trace: str) -> float:
        name = f"factor {trace}"
        self._once(name, lambda: {"factor": peak_factor(self._traces[trace], self._profile, self._terms)})
        return float(self._kept[name]["factor"])

    def _fleet(self, load: Load, seed: int) -> Kept:
        engines = smallest_fleet(load, self._profile, self._terms, seed) or self._terms.fleet.max_engines
        law = FixedLaw(engines)
        outcome = simulate(load, self._profile, law, self._terms, startup_s=0.0, seed=seed)
        return {"engines": engines, "requests": len(load), "outcome": asdict(outcome)}

    def _optimum(self, load: Load, seed: int, startup_s: float) -> Kept:
        return asdict(Planner(load, self._profile, self._terms, startup_s, seed).optimum(changes=0).outcome)

    def _attempt(self, law: str, changes: Setting, load: Load, seed: int, startup_s: float) -> Kept:
        made = make_law(law, self._terms, setting=changes)
        return asdict(simulate(load, self._profile, made, self._terms, startup_s=startup_s, seed=seed))


def table(kept: Mapping[str, Any], scenario: Scenario) -> Iterator[str]:
    """Yield the Markdown lines: a row for each load and law, over the seeds that have results.

    Attained are the mean and the lowest of the seeds; the ratio is that of the pod-hours to the optimum's.
    """
    yield _HEAD
    for load in LOADS:
        fleets = [
            kept[f"fleet: {load} seed {seed}"] for seed in scenario.load.seeds if f"fleet: {load} seed {seed}" in kept
        ]
        if not fleets:
            continue
        sizes = ", ".join(str(fleet["engines"]) for fleet in fleets)
        for law in ("fixed", "optimum", *_LAWS):
            cells = [_cells(kept, load, law, startup_s, scenario) for startup_s in scenario.fleet.startup_s]
            if all(cells):
                label = f"fixed fleet of {sizes}" if law == "fixed" else law
                yield f"| {_SHORT.get(load, load)} | {label} | {' | '.join(cell for cell in cells if cell)} |"


def starts_table(kept: Mapping[str, Any], scenario: Scenario) -> Iterator[str]:
    """Yield the Markdown lines of Pagestream's law, begun with the scenario's engines and with enough of them."""
    columns = [f"{s:g} s, {what}" for s in scenario.fleet.startup_s for what in ("usual start", "enough engines")]
    yield f"| load, engines | {' | '.join(columns)} |"
    yield f"|---|{'---|' * len(columns)}"
    for load in LOADS:
        seeds = [seed for seed in scenario.load.seeds[:1] if f"fleet: {load} seed {seed}" in kept]
        sizes = ", ".join(str(kept[f"fleet: {load} seed {seed}"]["engines"]) for seed in seeds)
        cells = []
        for startup_s in scenario.fleet.startup_s:
            for law in ("pagestream", "started with enough"):
                places = [f"{law}: {load} seed {seed} startup {startup_s:g}" for seed in seeds]
                found = [kept[place] for place in places if place in kept]
                if found:
                    attained = 100 * _mean(found, "attainment")
                    cells.append(f"{attained:.2f} %, {_mean(found, 'pod_hours'):.2f}")
        if len(cells) == len(columns):
            yield f"| {_SHORT.get(load, load)}, {sizes} | {' | '.join(cells)} |"


def restarts_table(kept: Mapping[str, Any], scenario: Scenario) -> Iterator[str]:
    """Yield the Markdown lines of late requests after a restart, over the seeds that have results."""
    columns = [f"{s:g} s, at {at}" for s in scenario.fleet.startup_s for at in RESTARTS]
    yield f"| load | {' | '.join(columns)} |"
    yield f"|---|{'---|' * len(columns)}"
    for load in LOADS:
        cells = []
        for startup_s in scenario.fleet.startup_s:
            for at in RESTARTS:
                places = [f"restart at {at}: {load} seed {s} startup {startup_s:g}" for s in scenario.load.seeds]
                found = [kept[place] for place in places if place in kept]
                if found:
                    cells.append(f"{100 * _mean(found, 'late'):.1f}, {100 * _mean(found, 'late_restarted'):.1f}")
        if len(cells) == len(columns):
            yield f"| {_SHORT.get(load, load)} | {' | '.join(cells)} |"


def _mean(found: Sequence[Mapping[str, Any]], name: str) -> float:
    return float(sum(outcome[name] for outcome in found) / len(found))


def _cells(kept: Mapping[str, Any], load: str, law: str, startup_s: float, scenario: Scenario) -> str | None:
    places = [f"{load} seed {seed} startup {startup_s:g}" for seed in scenario.load.seeds]
    found = [kept[f"{law}: {place}"] for place in places if f"{law}: {place}" in kept]
    plans = [kept[f"optimum: {place}"] for place in places if f"optimum: {place}" in kept]
    if not found or not plans:
        return None
    attained = [100 * outcome["attainment"] for outcome in found]
    hours, best, orders = _mean(found, "pod_hours"), _mean(plans, "pod_hours"), _mean(found, "pods_up")
    mean = sum(attained) / len(attained)
    return f"{mean:.2f} / {min(attained):.2f} | {hours:.2f} | {hours / best:.2f} | {orders:.0f}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the loads, or print the table of a finished file."""
    parser = argparse.ArgumentParser(description="Runs all loads through all laws, and prints one table.")
    parser.add_argument("--traces", type=Path, metavar="DIR", help=f"folder with {', '.join(TRACES)}")
    parser.add_argument("--profile", type=Path, default=packaged_profile(), metavar="FILE", help="engine profile")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="JSON; an existing file is resumed")
    parser.add_argument("--loads", nargs="+", default=LOADS, choices=LOADS, metavar="LOAD", help=", ".join(LOADS))
    parser.add_argument("--seeds", nargs="+", type=int, default=Scenario().load.seeds, metavar="N", help="of the loads")
    given = parser.parse_args(arguments)
    scenario = replace(Scenario(), load=replace(Scenario().load, seeds=tuple(given.seeds)))
    kept = json.loads(given.output.read_text()) if given.output.exists() else {}
    if given.traces is not None:
        traces = {name: read_trace(str(given.traces / name)) for name in TRACES}
        synthetic = given.traces / SYNTHETIC
        traces[SYNTHETIC] = read_trace(str(synthetic)) if synthetic.exists() else synthetic_rows()
        study = Overview(scenario, read_profile(given.profile), traces, kept, lambda all_: _write(given.output, all_))
        study.run(given.loads)
    for made in (table, starts_table, restarts_table):
        print("\n".join(made(kept, scenario)) + "\n")
    return 0


def _write(path: Path, content: Kept) -> None:
    made = path.with_suffix(".part")
    made.write_text(json.dumps(content, indent=1) + "\n")
    made.replace(path)


if __name__ == "__main__":
    sys.exit(main())
