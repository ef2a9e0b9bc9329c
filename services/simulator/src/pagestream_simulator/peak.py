"""Scales a trace so that the smallest fixed fleet that attains the objective has a given size."""

from __future__ import annotations

from collections.abc import Sequence

from pagestream_simulator.errors import SettingInvalidError
from pagestream_simulator.fleet.profile import EngineProfile
from pagestream_simulator.laws import FixedLaw
from pagestream_simulator.simulation import simulate
from pagestream_simulator.terms import Terms
from pagestream_simulator.traces.files import TraceRow
from pagestream_simulator.traces.load import Load, scale_arrivals

_STEPS = 12
_FACTOR_MAX = 4096.0


def scaled_load(rows: Sequence[TraceRow], factor: float, terms: Terms, seed: int) -> Load:
    """Return a load with `factor` times the trace's requests, scaled as the terms say."""
    return scale_arrivals(
        rows,
        factor,
        jitter_s=terms.load.jitter_s,
        context_tokens=terms.load.context_tokens,
        partitions=terms.fleet.partitions,
        seed=seed,
    )


def smallest_fleet(load: Load, profile: EngineProfile, terms: Terms, seed: int = 0) -> int | None:
    """Return the size of the smallest fixed fleet that attains the objective; None if `max_engines` don't."""

    def attains(engines: int) -> bool:
        outcome = simulate(load, profile, FixedLaw(engines), terms, startup_s=0.0, seed=seed)
        return outcome.attainment >= terms.objective.attainment

    low, high = 0, terms.fleet.max_engines  # low doesn't attain
    if not attains(high):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if attains(middle) else (middle, high)
    return high


def peak_factor(rows: Sequence[TraceRow], profile: EngineProfile, terms: Terms, seed: int = 0) -> float:
    """Return the largest factor, within 1 part in 2,000, at which `engines_at_peak` engines attain the objective.

    Raises:
        SettingInvalidError: single requests miss the objective, or no factor is too much.
    """

    def attains(factor: float) -> bool:
        load = scaled_load(rows, factor, terms, seed)
        law = FixedLaw(terms.load.engines_at_peak)
        return simulate(load, profile, law, terms, startup_s=0.0, seed=seed).attainment >= terms.objective.attainment

    low, high = 0.0, 1.0
    while attains(high):
        low, high = high, 2 * high
        if high > _FACTOR_MAX:
            raise SettingInvalidError(
                f"{len(rows)} requests, {_FACTOR_MAX:g} times, need fewer than {terms.load.engines_at_peak} engines",
                hint="give a longer trace or fewer engines at the peak",
            )
    for _ in range(_STEPS):
        middle = (low + high) / 2
        if len(rows) * middle < 1:
            break
        low, high = (middle, high) if attains(middle) else (low, middle)
    if low == 0:
        raise SettingInvalidError(
            f"single requests take longer than the objective of {terms.objective.ttft_s:g} s",
            hint="give shorter requests or a faster engine profile",
        )
    return low
