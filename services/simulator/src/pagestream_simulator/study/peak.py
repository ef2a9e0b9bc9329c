"""How many times a trace's requests need a fixed fleet of a given size."""

from __future__ import annotations

from collections.abc import Sequence

from pagestream_simulator.errors import WorkloadInvalidError
from pagestream_simulator.fleet.profile import EngineProfile
from pagestream_simulator.laws import FixedLaw
from pagestream_simulator.load import Load, scaled
from pagestream_simulator.run import simulate
from pagestream_simulator.terms import Terms
from pagestream_simulator.traces import TraceRow

_STEPS = 12
_FACTOR_MAX = 4096.0


def scaled_load(rows: Sequence[TraceRow], factor: float, terms: Terms, seed: int) -> Load:
    """The trace with `factor` times its requests, by the terms."""
    return scaled(
        rows,
        factor,
        jitter_s=terms.load.jitter_s,
        context_tokens=terms.load.context_tokens,
        partitions=terms.fleet.partitions,
        seed=seed,
    )


def peak_factor(rows: Sequence[TraceRow], profile: EngineProfile, terms: Terms, seed: int = 0) -> float:
    """The largest factor, within 1 part in 2,000, at which `engines_at_peak` engines attain the objective.

    Raises:
        WorkloadInvalidError: one request at a time is too slow for the objective already, or no load is too much.
    """

    def attains(factor: float) -> bool:
        load = scaled_load(rows, factor, terms, seed)
        law = FixedLaw(terms.load.engines_at_peak)
        return simulate(load, profile, law, terms, startup_s=0.0, seed=seed).attainment >= terms.objective.attainment

    low, high = 0.0, 1.0
    while attains(high):
        low, high = high, 2 * high
        if high > _FACTOR_MAX:
            raise WorkloadInvalidError("the trace is too thin to need so many engines", hint="give a longer one")
    for _ in range(_STEPS):
        middle = (low + high) / 2
        if len(rows) * middle < 1:
            break
        low, high = (middle, high) if attains(middle) else (low, middle)
    if low == 0:
        raise WorkloadInvalidError("no load is small enough for the objective: single requests take longer")
    return low
