"""The search for a law's best setting: the same for every law."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pagestream_scaling import PolicyInvalid

from pagestream_simulator.run import Outcome
from pagestream_simulator.study.spaces import Setting, Space

_KEEP = 0.5
"""Chance that a drawn setting has a number's default."""
_CHANGES = (1, 2, 3, 4)


@dataclass(frozen=True, slots=True)
class Trial:
    """A setting and what it came to, for each start-up time."""

    setting: Setting
    outcomes: tuple[Outcome, ...]

    def rank(self, attainment: float) -> tuple[bool, float]:
        """The lowest is the best: the fewest pod-hours among those that attain, else the highest attainment."""
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
    """All trials, the best first: the default, then drawn settings, and from half of them on changes of the best."""
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
            continue  # numbers that don't fit together are no trial
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
