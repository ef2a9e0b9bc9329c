"""Loads: a trace with its arrival rate multiplied."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from pagestream_engine.scheduler.policies import LengthPredictor, RequestShape

from pagestream_simulator.traces import TraceRow, scale_to_context

LEARNT_S = 30.0
"""Seconds from a request's arrival to the time at which gateways know its length: what an answer takes, about."""
_MOST_OUTPUT = 131_072


@dataclass(frozen=True, slots=True, eq=False)
class Load:
    """Requests in order of arrival, as arrays of equal length."""

    arrival_s: npt.NDArray[np.float64]
    prompt_tokens: npt.NDArray[np.int32]
    output_tokens: npt.NDArray[np.int32]
    partition: npt.NDArray[np.int32]
    """Partition of the queue, counted from 0."""

    def __len__(self) -> int:
        """Return the number of requests."""
        return len(self.arrival_s)

    @property
    def duration_s(self) -> float:
        """Seconds from the trace's begin to the last arrival."""
        return float(self.arrival_s[-1])


def expected_outputs(load: Load) -> npt.NDArray[np.int32]:
    """Return what a gateway would expect of each output, from requests that came at least LEARNT_S before."""
    predictor, expected, learnt = LengthPredictor(), np.zeros(len(load), dtype=np.int32), 0
    shapes = [RequestShape(int(tokens), "", _MOST_OUTPUT) for tokens in load.prompt_tokens]
    for number, arrival in enumerate(load.arrival_s):
        while load.arrival_s[learnt] < arrival - LEARNT_S:
            predictor.note_length(shapes[learnt], int(load.output_tokens[learnt]))
            learnt += 1
        expected[number] = round(predictor.expected_of(shapes[number])) if learnt else 0
    return expected


def scale_arrivals(
    rows: Sequence[TraceRow], factor: float, *, jitter_s: float, context_tokens: int, partitions: int, seed: int
) -> Load:
    """Return a load with `factor` times a trace's requests.

    The first copy of a request arrives when it did, the others up to `jitter_s` before or after, so that longer bursts
    keep their height. The fraction of `factor` is the probability of one more copy. Lengths are shrunk to
    `context_tokens`, as `pagestream bench --scale-to-context` does. Partitions are drawn, since all prompts differ.
    """
    rng = np.random.default_rng(seed)
    fitted = scale_to_context(rows, context_tokens)
    copies = np.floor(factor + rng.random(len(fitted))).astype(np.int64)
    index = np.repeat(np.arange(len(fitted)), copies)
    is_first = np.concatenate(([True], index[1:] != index[:-1])) if len(index) else np.zeros(0, dtype=bool)
    arrival = np.array([row.arrival_s for row in fitted])[index]
    moved = arrival + rng.uniform(-jitter_s, jitter_s, len(index))
    last = fitted[-1].arrival_s
    arrival = np.where(is_first, arrival, np.clip(moved, 0.0, last))
    order = np.argsort(arrival, kind="stable")
    index = index[order]
    return Load(
        arrival_s=np.ascontiguousarray(arrival[order]),
        prompt_tokens=np.array([row.input_tokens for row in fitted], dtype=np.int32)[index],
        output_tokens=np.array([row.output_tokens for row in fitted], dtype=np.int32)[index],
        partition=rng.integers(0, partitions, len(index), dtype=np.int32),
    )
