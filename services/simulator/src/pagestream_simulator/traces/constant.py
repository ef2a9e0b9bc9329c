"""Constant arrivals: a Poisson process of equal requests."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pagestream_simulator.traces.load import Load


@dataclass(frozen=True, slots=True)
class ConstantArrivals:
    """Equal requests that arrive independently of each other."""

    rate: float
    """Requests a second."""
    prompt_tokens: int
    output_tokens: int
    seconds: float = 3600.0

    @property
    def name(self) -> str:
        """What tables call it."""
        return f"{self.rate:g}/s of {self.prompt_tokens} + {self.output_tokens}"

    def load(self, partitions: int, seed: int) -> Load:
        """Draw arrivals and partitions."""
        rng = np.random.default_rng(seed)
        count = int(rng.poisson(self.rate * self.seconds))
        return Load(
            arrival_s=np.sort(rng.uniform(0.0, self.seconds, count)),
            prompt_tokens=np.full(count, self.prompt_tokens, dtype=np.int32),
            output_tokens=np.full(count, self.output_tokens, dtype=np.int32),
            partition=rng.integers(0, partitions, count, dtype=np.int32),
        )
