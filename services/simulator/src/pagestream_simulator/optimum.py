"""The clairvoyant optimum of a load, and the load at which a fixed fleet of a given size is just enough.

A plan is made with all arrivals known. It holds the number of ready engines for each slot of SLOT_S. Its cost follows
from the start-up time: a pod is ordered one start-up before it is needed, and kept where it is needed again within one
(a new one would cost as much). The search starts with fluid demand, scaled until the objective is just met in
simulation, or with the smallest fixed fleet that meets it if that costs less; then it tries many small changes and
keeps each one that costs less and still meets it. The result is a plan that works and thereby an upper bound of the
optimum's cost; `lower_bound` is a lower one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pagestream_simulator.errors import SettingInvalidError
from pagestream_simulator.laws import FixedLaw, PlannedLaw
from pagestream_simulator.load import Load, TraceRow, scale_arrivals
from pagestream_simulator.profile import EngineProfile
from pagestream_simulator.scenario import Scenario
from pagestream_simulator.simulation import Outcome, simulate

_FACTOR_STEPS = 12
_FACTOR_MAX = 4096.0


def scaled_load(rows: Sequence[TraceRow], factor: float, scenario: Scenario, seed: int) -> Load:
    """Return a load with `factor` times the trace's requests, scaled as the scenario says."""
    return scale_arrivals(
        rows,
        factor,
        jitter_s=scenario.load.jitter_s,
        context_tokens=scenario.load.context_tokens,
        partitions=scenario.fleet.partitions,
        seed=seed,
    )


def smallest_fleet(load: Load, profile: EngineProfile, scenario: Scenario, seed: int = 0) -> int | None:
    """Return the size of the smallest fixed fleet that attains the objective; None if `max_engines` don't."""

    def attains(engines: int) -> bool:
        outcome = simulate(load, profile, FixedLaw(engines), scenario, startup_s=0.0, seed=seed)
        return outcome.attainment >= scenario.objective.attainment

    low, high = 0, scenario.fleet.max_engines  # low doesn't attain
    if not attains(high):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if attains(middle) else (middle, high)
    return high


def peak_factor(rows: Sequence[TraceRow], profile: EngineProfile, scenario: Scenario, seed: int = 0) -> float:
    """Return the largest factor, within 1 part in 2,000, at which `engines_at_peak` engines attain the objective.

    Raises:
        SettingInvalidError: single requests miss the objective, or no factor is too much.
    """

    def attains(factor: float) -> bool:
        load = scaled_load(rows, factor, scenario, seed)
        law = FixedLaw(scenario.load.engines_at_peak)
        outcome = simulate(load, profile, law, scenario, startup_s=0.0, seed=seed)
        return outcome.attainment >= scenario.objective.attainment

    low, high = 0.0, 1.0
    while attains(high):
        low, high = high, 2 * high
        if high > _FACTOR_MAX:
            raise SettingInvalidError(
                f"{len(rows)} requests, {_FACTOR_MAX:g} times, need fewer than {scenario.load.engines_at_peak} engines",
                hint="give a longer trace or fewer engines at the peak",
            )
    for _ in range(_FACTOR_STEPS):
        middle = (low + high) / 2
        if len(rows) * middle < 1:
            break
        low, high = (middle, high) if attains(middle) else (low, middle)
    if low == 0:
        raise SettingInvalidError(
            f"single requests take longer than the objective of {scenario.objective.ttft_s:g} s",
            hint="give shorter requests or a faster engine profile",
        )
    return low


SLOT_S = 5.0
WINDOW_S = 1.0
PEAK_SHARES = (0.25,)
"""Weights of a slot's busiest second against its mean; each is tried."""
_STEPS = 7
"""Bisections of the multiple of fluid demand."""

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """Ready engines by slot, and the outcome."""

    needed: Counts
    outcome: Outcome


def service_seconds(load: Load, profile: EngineProfile) -> Floats:
    """Return the least engine seconds of each request: its steps are shared by as many sequences as the pool holds."""
    cost = profile.cost
    prompt, output = load.prompt_tokens.astype(np.float64), load.output_tokens.astype(np.float64)
    pool = profile.kv_blocks * profile.block_size
    shared = max(1.0, min(profile.max_num_seqs, pool / float(np.mean(prompt + output))))
    context = prompt + output / 2
    prefill = prompt * cost.prefill_token_s + prompt * (prompt + 1) / 2 * cost.prefill_pair_s
    return prefill + (output - 1) * (cost.fixed_s / shared + cost.decode_s + context * cost.decode_context_s)


def lower_bound(load: Load, profile: EngineProfile, attainment: float) -> float:
    """Return pod-hours that no plan can go below.

    They are the work of the cheapest requests that have to meet the objective, without waits, idle time and start-ups.
    """
    seconds = np.sort(service_seconds(load, profile))
    return float(seconds[: int(np.ceil(attainment * len(seconds)))].sum() / 3600)


def planned(needed: Counts, startup_s: float, slot_s: float = SLOT_S) -> PlannedLaw:
    """Return the law that orders each engine one start-up before its slot."""
    ahead = int(np.ceil(startup_s / slot_s))
    # Orders are made at whole seconds: the latest that is early enough.
    lead_s = float(np.ceil(startup_s))
    begins = np.arange(len(needed)) * slot_s
    times = np.unique(np.concatenate((begins, np.maximum(0.0, begins - lead_s))))
    counts = []
    for time_s in times:
        first = int(time_s // slot_s)
        last = min(len(needed) - 1, first + ahead + 1)
        window = [needed[i] for i in range(first, last + 1) if i == first or begins[i] <= time_s + lead_s]
        counts.append(int(max(window)))
    return PlannedLaw(tuple(map(float, times)), tuple(counts))


class Planner:
    """Searches a plan for one load."""

    def __init__(self, load: Load, profile: EngineProfile, scenario: Scenario, startup_s: float, seed: int) -> None:
        self._load, self._profile, self._terms = load, profile, scenario
        self._startup_s, self._seed = startup_s, seed
        self._slots = int(load.duration_s // SLOT_S) + 1
        self._random = np.random.default_rng(seed)
        self._misses: Floats = np.zeros(self._slots)

    def optimum(self, changes: int) -> Plan:
        """Return the best plan after trying this number of changes."""
        plans = [self._scaled(share) for share in PEAK_SHARES]
        best = min([*plans, *self._constant()], key=lambda plan: plan.outcome.pod_hours)
        self._evaluated(best.needed)
        share, kept = 0.3, 0
        for number in range(changes):
            misses = self._misses
            plan = self._evaluated(self._changed(best.needed, share))
            if self._is_better(plan, best):
                best, kept = plan, kept + 1
            else:
                self._misses = misses
            if number % 10 == 9:  # steps are sized so that about one change in five is kept
                share, kept = min(0.5, max(0.01, share * (1.4 if kept > 2 else 0.7))), 0
        return best

    def _is_better(self, plan: Plan, best: Plan) -> bool:
        return (
            plan.outcome.attainment >= self._terms.objective.attainment
            and plan.outcome.pod_hours < best.outcome.pod_hours
        )

    def _scaled(self, share: float) -> Plan:
        """Return the least multiple of the fluid demand that meets the objective."""
        demand = self._demand(share)
        low, high = 0.25, 1.0
        plan = self._evaluated(_whole(demand * high))
        while plan.outcome.attainment < self._terms.objective.attainment:
            low, high = high, high * 1.5
            plan = self._evaluated(_whole(demand * high))
        for _ in range(_STEPS):
            middle = (low + high) / 2
            tried = self._evaluated(_whole(demand * middle))
            if tried.outcome.attainment >= self._terms.objective.attainment:
                high, plan = middle, tried
            else:
                low = middle
        return plan

    def _constant(self) -> list[Plan]:
        """Return the plan of the smallest fixed fleet that meets the objective, if one of the scenario's sizes does."""
        engines = smallest_fleet(self._load, self._profile, self._terms, self._seed)
        return [] if engines is None else [self._evaluated(np.full(self._slots, engines, dtype=np.int64))]

    def _demand(self, share: float) -> Floats:
        """Return the engines that a slot's arrivals keep busy: its mean, and its busiest second weighted by `share`."""
        seconds = service_seconds(self._load, self._profile)
        per_slot = round(SLOT_S / WINDOW_S)
        windows = np.bincount(
            (self._load.arrival_s // WINDOW_S).astype(np.int64), weights=seconds, minlength=self._slots * per_slot
        )[: self._slots * per_slot].reshape(self._slots, per_slot)
        demand: Floats = (1 - share) * windows.sum(axis=1) / SLOT_S + share * windows.max(axis=1) / WINDOW_S
        return demand

    def _changed(self, needed: Counts, share: float) -> Counts:
        """Remove an engine in some stretches and add one in a few; stretches with the fewest misses lose first."""
        changed = needed.copy()
        order = self._random.permutation(self._slots)
        lengths = self._random.integers(1, 8, self._slots)
        misses = np.convolve(self._misses, np.ones(7) / 7, mode="same")
        usual = np.quantile(misses, 0.8)
        for place in order[: max(1, int(share * self._slots / 4))]:
            stretch = slice(place, place + lengths[place])
            if misses[place] <= usual or self._random.random() < 0.1:
                changed[stretch] -= 1
            elif self._random.random() < 0.5:
                changed[stretch] += 1
        result: Counts = np.maximum(changed, 0)
        return result

    def _evaluated(self, needed: Counts) -> Plan:
        times: list[Floats] = []
        law = planned(needed, self._startup_s)
        outcome = simulate(
            self._load,
            self._profile,
            law,
            self._terms,
            startup_s=self._startup_s,
            seed=self._seed,
            on_ttft=times.append,
        )
        late = times[0] > self._terms.objective.ttft_s
        slots = (self._load.arrival_s // SLOT_S).astype(np.int64)
        self._misses = np.bincount(slots, weights=late, minlength=self._slots).astype(np.float64)
        return Plan(needed, outcome)


def _whole(demand: Floats) -> Counts:
    return np.ceil(demand).astype(np.int64)
