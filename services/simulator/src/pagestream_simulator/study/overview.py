"""One table of all loads: `python -m pagestream_simulator.study.overview --traces DIR --output FILE`.

It runs three traces and constant arrivals, each with the seeds and start-up times of the terms, through the best fixed
fleet, the optimum, Pagestream's law with its defaults and HPA's with its own and with the best that a search on the
conversations found. Results are written as they come, and an interrupted run resumes after the last one; without
`--traces` a file is printed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pagestream_simulator.fleet.profile import EngineProfile, packaged_profile, read_profile
from pagestream_simulator.laws import FixedLaw
from pagestream_simulator.simulation import simulate
from pagestream_simulator.study.optimum import Planner
from pagestream_simulator.study.peak import peak_factor, scaled_load, smallest_fleet
from pagestream_simulator.study.spaces import Setting, spaces
from pagestream_simulator.terms import Terms
from pagestream_simulator.traces.constant import ConstantArrivals
from pagestream_simulator.traces.files import TraceRow, read_trace
from pagestream_simulator.traces.load import Load

TRACES = ("azure_llm_2023_code.csv", "azure_llm_2023_conv.csv", "mooncake_conversation.jsonl")
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
_LAWS: Mapping[str, tuple[str, Setting]] = {
    "pagestream": ("pagestream", {}),
    "hpa": ("hpa", {}),
    "hpa tuned": ("hpa", HPA_TUNED),
}
"""By label: the law, and what differs from its defaults."""
_SHORT = {"azure_llm_2023_code.csv": "code", "azure_llm_2023_conv.csv": "conversations"} | {
    "mooncake_conversation.jsonl": "Mooncake"
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
        terms: Terms,
        profile: EngineProfile,
        traces: Mapping[str, Sequence[TraceRow]],
        kept: Kept,
        keep: Callable[[Kept], None],
    ) -> None:
        self._terms, self._profile, self._traces = terms, profile, traces
        self._kept, self._keep = kept, keep

    def run(self) -> None:
        """Run each load through each law, one seed after the other."""
        constant = {each.name: each for each in CONSTANT}
        for seed in self._terms.load.seeds:
            for name in (*self._traces, *constant):
                if name in constant:
                    load = constant[name].load(self._terms.fleet.partitions, seed)
                else:
                    load = scaled_load(self._traces[name], self._factor(name), self._terms, seed)
                self._judge(name, load, seed)

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
        space = spaces(self._terms)[law]
        made = space.make({**space.default, **changes})
        return asdict(simulate(load, self._profile, made, self._terms, startup_s=startup_s, seed=seed))


def table(kept: Mapping[str, Any], terms: Terms) -> Iterator[str]:
    """Yield the Markdown lines: a row for each load and law, over the seeds that have results.

    Attained are the mean and the lowest of the seeds; the ratio is that of the pod-hours to the optimum's.
    """
    yield _HEAD
    for load in (*TRACES, *(each.name for each in CONSTANT)):
        fleets = [
            kept[f"fleet: {load} seed {seed}"] for seed in terms.load.seeds if f"fleet: {load} seed {seed}" in kept
        ]
        if not fleets:
            continue
        sizes = ", ".join(str(fleet["engines"]) for fleet in fleets)
        for law in ("fixed", "optimum", *_LAWS):
            cells = [_cells(kept, load, law, startup_s, terms) for startup_s in terms.fleet.startup_s]
            if all(cells):
                label = f"fixed fleet of {sizes}" if law == "fixed" else law
                yield f"| {_SHORT.get(load, load)} | {label} | {' | '.join(cell for cell in cells if cell)} |"


def _cells(kept: Mapping[str, Any], load: str, law: str, startup_s: float, terms: Terms) -> str | None:
    places = [f"{load} seed {seed} startup {startup_s:g}" for seed in terms.load.seeds]
    found = [kept[f"{law}: {place}"] for place in places if f"{law}: {place}" in kept]
    plans = [kept[f"optimum: {place}"] for place in places if f"optimum: {place}" in kept]
    if not found or not plans:
        return None
    attained = [100 * outcome["attainment"] for outcome in found]
    hours, best, orders = (
        sum(outcome[name] for outcome in outcomes) / len(outcomes)
        for outcomes, name in ((found, "pod_hours"), (plans, "pod_hours"), (found, "pods_up"))
    )
    mean = sum(attained) / len(attained)
    return f"{mean:.2f} / {min(attained):.2f} | {hours:.2f} | {hours / best:.2f} | {orders:.0f}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the loads, or print the table of a finished file."""
    parser = argparse.ArgumentParser(description="Runs all loads through all laws, and prints one table.")
    parser.add_argument("--traces", type=Path, metavar="DIR", help=f"folder with {', '.join(TRACES)}")
    parser.add_argument("--profile", type=Path, default=packaged_profile(), metavar="FILE", help="engine profile")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="JSON; an existing file is resumed")
    given = parser.parse_args(arguments)
    terms, kept = Terms(), json.loads(given.output.read_text()) if given.output.exists() else {}
    if given.traces is not None:
        traces = {name: read_trace(str(given.traces / name)) for name in TRACES}
        Overview(terms, read_profile(given.profile), traces, kept, lambda all_: _write(given.output, all_)).run()
    print("\n".join(table(kept, terms)))
    return 0


def _write(path: Path, content: Kept) -> None:
    made = path.with_suffix(".part")
    made.write_text(json.dumps(content, indent=1) + "\n")
    made.replace(path)


if __name__ == "__main__":
    sys.exit(main())
