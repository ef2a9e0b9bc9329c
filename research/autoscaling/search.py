"""Searches a law's best setting, in the same way for every law."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pagestream_scaling import PolicyInvalid
from pagestream_simulator.simulation import Outcome

from research.autoscaling.spaces import Setting, Space

_KEEP = 0.5
"""Probability that a drawn setting keeps a value's default."""
_CHANGES = (1, 2, 3, 4)
"""Numbers of values that a change of the best setting draws anew."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A setting and its outcome at each start-up time."""

    setting: Setting
    outcomes: tuple[Outcome, ...]

    def rank(self, attainment: float) -> tuple[bool, float]:
        """Return a sort key: the fewest pod-hours first among trials that attain, then the highest attainment."""
        lowest = min(outcome.attainment for outcome in self.outcomes)
        if lowest >= attainment:
            return (False, sum(outcome.pod_hours for outcome in self.outcomes))
        return (True, -lowest)


def search(
    space: Space,
    attempt: Callable[[Setting], Sequence[Outcome]],
    *,
    trials: int,
    attainment: float,
    seed: int,
) -> list[Trial]:
    """Try the default, then drawn settings, and in the second half changes of the best one.

    Args:
        attempt: runs a setting at each start-up time.
        attainment: share of the requests that must meet the objective.

    Returns:
        All trials, the best first.
    """
    rng = random.Random(seed)
    done = [Trial(space.default, tuple(attempt(space.default)))]
    while len(done) < trials:
        best = min(done, key=lambda trial: trial.rank(attainment))
        setting = _drawn(space, rng) if len(done) <= trials // 2 else _changed(space, best.setting, rng)
        if any(trial.setting == setting for trial in done):
            continue
        try:
            space.make(setting)
        except PolicyInvalid:
            continue  # values that contradict each other don't count as a trial
        done.append(Trial(setting, tuple(attempt(setting))))
    return sorted(done, key=lambda trial: trial.rank(attainment))


def _drawn(space: Space, rng: random.Random) -> dict[str, float]:
    return {
        name: space.default[name] if rng.random() < _KEEP else rng.choice(values)
        for name, values in space.values.items()
    }


def _changed(space: Space, setting: Setting, rng: random.Random) -> dict[str, float]:
    names = rng.sample(sorted(space.values), rng.choice(_CHANGES))
    return dict(setting) | {name: rng.choice(space.values[name]) for name in names}
