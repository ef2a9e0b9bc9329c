"""Prints the study's results as Markdown tables: `python -m research.autoscaling.tables autoscaling.json`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pagestream_simulator.simulation import format_ttft

_HEAD = "| law | attained, mean (lowest) | TTFT p50 | p99 | pod-hours | of the optimum | pods ordered |"
_LINE = "|---|---|---|---|---|---|---|"
_LAWS = ("pagestream", "hpa", "keda")
_EARLIER = "earlier "
"""Prefix of results of an earlier state of the law."""
Numbers = Mapping[str, Any]


def tables(kept: Numbers) -> Iterator[str]:
    """Yield the lines of one table for each trace and start-up time, over its seeds."""
    places = sorted({name.removeprefix("reference ") for name in kept if name.startswith("reference ")})
    groups = sorted({(place.split(" seed ")[0], place.split(" startup ")[1]) for place in places})
    chosen = sorted({name.split(" tuned on ")[1].split(":")[0] for name in kept if " tuned on " in name})
    for trace, startup in groups:
        seeds = [place for place in places if place.startswith(f"{trace} seed ") and place.endswith(f" {startup}")]
        references = [kept[f"reference {place}"] for place in seeds]
        best = _mean([reference["optimum"] for reference in references], "pod_hours")
        yield f"\n**{trace}, start-up {startup} s** ({len(seeds)} seeds, {references[0]['requests']} requests)\n"
        yield f"{_HEAD}\n{_LINE}"
        yield _row("optimum", [reference["optimum"] for reference in references], best)
        yield _row("fixed fleet", [reference["fixed"] for reference in references], best)
        for on in chosen:
            yield from _rows(kept, [f"{law} tuned on {on}" for law in (*_LAWS, _EARLIER + _LAWS[0])], seeds, best)
        yield from _rows(kept, [f"{law} default" for law in (*_LAWS, _EARLIER + _LAWS[0])], seeds, best)
        bound = sum(reference["lower_bound_pod_hours"] for reference in references) / len(references)
        yield f"\nNo plan costs less than {bound:.2f} pod-hours.\n"


def _rows(kept: Numbers, labels: Sequence[str], places: Sequence[str], best: float) -> Iterator[str]:
    """Yield a row for each label that has results, with its seeds where some have none."""
    for label in labels:
        there = [place for place in places if f"{label}: {place}" in kept]
        if there:
            seeds = ", ".join(place.split(" seed ")[1].split(" ")[0] for place in there)
            name = label if len(there) == len(places) else f"{label} (seed {seeds})"
            yield _row(name, [kept[f"{label}: {place}"] for place in there], best)


def _row(label: str, found: Sequence[Numbers], best: float) -> str:
    attained = [outcome["attainment"] for outcome in found]
    hours = _mean(found, "pod_hours")
    share = f"{100 * sum(attained) / len(attained):.2f} % ({100 * min(attained):.2f} %)"
    times = " | ".join(format_ttft(_mean(found, name)) for name in ("ttft_p50_s", "ttft_p99_s"))
    return f"| {label} | {share} | {times} | {hours:.2f} | {hours / best:.2f} | {_mean(found, 'pods_up'):.0f} |"


def _mean(found: Sequence[Numbers], name: str) -> float:
    return float(sum(outcome[name] for outcome in found) / len(found))


if __name__ == "__main__":
    print("\n".join(tables(json.loads(Path(sys.argv[1]).read_text()))))
