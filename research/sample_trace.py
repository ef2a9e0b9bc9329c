"""Generates this package's small trace: `python -m research.sample_trace [FILE]`.

Its rows are drawn, not recorded. Arrivals are a Poisson process whose rate follows a sine (a burst each minute);
lengths are log-normal, the output's independent of the prompt's, with the medians and spreads below: short chats and a
few long documents.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

from pagestream_simulator.load import sample_path, write_csv

REQUESTS = 400
SEED = 0
BEGIN = datetime(2026, 1, 1, tzinfo=UTC).replace(tzinfo=None)
MEAN_RATE = 4.0
"""Requests a second."""
SWING = 0.75
"""Amplitude of the rate, as a share of its mean."""
PERIOD_S = 60.0
PROMPT_MEDIAN, PROMPT_SIGMA, PROMPT_MAX = 600.0, 1.1, 8000
OUTPUT_MEDIAN, OUTPUT_SIGMA, OUTPUT_MAX = 120.0, 0.8, 1000


def sample_rows(count: int = REQUESTS, seed: int = SEED) -> Iterator[tuple[datetime, int, int]]:
    """Yield arrival, prompt tokens and output tokens of each request; a seed always yields the same."""
    rng = random.Random(seed)
    now_s = 0.0
    for _ in range(count):
        yield (
            BEGIN + timedelta(microseconds=round(now_s * 1e6)),
            _length(rng, PROMPT_MEDIAN, PROMPT_SIGMA, PROMPT_MAX),
            _length(rng, OUTPUT_MEDIAN, OUTPUT_SIGMA, OUTPUT_MAX),
        )
        now_s += rng.expovariate(MEAN_RATE * (1 + SWING * math.sin(2 * math.pi * now_s / PERIOD_S)))


def _length(rng: random.Random, median: float, sigma: float, largest: int) -> int:
    return min(max(round(rng.lognormvariate(math.log(median), sigma)), 1), largest)


if __name__ == "__main__":
    write_csv(sample_rows(), Path(sys.argv[1]) if len(sys.argv) > 1 else sample_path())
