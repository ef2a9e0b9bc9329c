"""Loads by rule: equal requests at a constant rate, recorded lengths at a drawn rate, and Mooncake's synthetic trace.

`synthetic_rows` stands in for Mooncake's `synthetic_trace.jsonl` (FAST 2025) where that file can't be had. Arrivals are
a Poisson process of its rate. Its requests come from public sets of data, chats and long documents; lengths here are
log-normal with its medians and spreads. Blocks are unknown: fleets are simulated without prefix hits.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from pagestream_simulator.load import Load, TraceRow, scale_to_context


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


CODE_SHARE = 0.3
"""Of requests that have the lengths of code completions; the others have those of conversations."""
BURST_EVERY_S = 2400.0
"""Mean time between two bursts of a day."""
BURST_S, BURST_MIN_S = 60.0, 15.0
"""Mean and least length of a burst."""
BURST_TIMES = (1.5, 3.0)
"""Least and greatest factor by which a burst raises the rate."""


@dataclass(frozen=True, slots=True)
class MixedArrivals:
    """Independent arrivals at a rate that is constant, or goes up and down once, with bursts."""

    rate: float
    """Requests a second; of a day, at its least."""
    hours: float
    swing: float = 1.0
    """Of a day: its greatest rate over its least one, which it begins and ends with."""
    has_bursts: bool = False

    @property
    def name(self) -> str:
        """What tables call it."""
        if self.swing == 1 and not self.has_bursts:
            return f"Poisson, {self.rate:g}/s"
        return f"day of {self.hours:g} h with bursts"

    def load(
        self,
        conversations: Sequence[TraceRow],
        code: Sequence[TraceRow],
        *,
        context_tokens: int,
        partitions: int,
        seed: int,
    ) -> Load:
        """Draw arrivals, lengths and partitions. Lengths are shrunk to `context_tokens`."""
        rng = np.random.default_rng(1000 + seed)
        seconds = np.arange(int(self.hours * 3600))
        middle, amplitude = (1 + self.swing) / 2, (self.swing - 1) / 2
        rate = self.rate * (middle - amplitude * np.cos(2 * np.pi * seconds / len(seconds)))
        if self.has_bursts:
            for _ in range(int(rng.poisson(len(seconds) / BURST_EVERY_S))):
                at, lasts = int(rng.uniform(0, len(seconds))), max(BURST_MIN_S, rng.exponential(BURST_S))
                rate[at : at + int(lasts)] *= rng.uniform(*BURST_TIMES)
        counts = rng.poisson(rate)
        arrival = np.sort(np.repeat(seconds, counts) + rng.random(counts.sum()))
        drawn = _lengths(rng, len(arrival), (conversations, code), context_tokens)
        return Load(
            arrival_s=arrival,
            prompt_tokens=np.ascontiguousarray(drawn[:, 0]),
            output_tokens=np.ascontiguousarray(drawn[:, 1]),
            partition=rng.integers(0, partitions, len(arrival), dtype=np.int32),
        )


def _lengths(
    rng: np.random.Generator, count: int, traces: tuple[Sequence[TraceRow], Sequence[TraceRow]], context: int
) -> npt.NDArray[np.int32]:
    is_code = rng.random(count) < CODE_SHARE
    drawn = []
    for rows in traces:
        known = np.array([(row.input_tokens, row.output_tokens) for row in scale_to_context(rows, context)], np.int32)
        drawn.append(known[rng.integers(0, len(known), count)])
    return np.where(is_code[:, None], drawn[1], drawn[0])


REQUESTS = 3993
MEAN_GAP_S = 0.256
CHAT_SHARE = 0.3
"""Of requests whose prompt has fewer than 1,000 tokens."""
CHAT_PROMPT, CHAT_OUTPUT = (46.0, 1.4, 991), (250.0, 1.0, 842)
"""Median, standard deviation of the logarithm, and most tokens."""
DOCUMENT_PROMPT, DOCUMENT_OUTPUT = (17_661.0, 0.9, 191_378), (27.0, 1.7, 893)


def synthetic_rows(count: int = REQUESTS, seed: int = 0) -> list[TraceRow]:
    """Return requests by this rule; a seed always gives the same."""
    rng = random.Random(seed)
    now_s, rows = 0.0, []
    for _ in range(count):
        is_chat = rng.random() < CHAT_SHARE
        prompt, output = (CHAT_PROMPT, CHAT_OUTPUT) if is_chat else (DOCUMENT_PROMPT, DOCUMENT_OUTPUT)
        rows.append(TraceRow(now_s, _length(rng, *prompt), _length(rng, *output)))
        now_s += rng.expovariate(1 / MEAN_GAP_S)
    return rows


def _length(rng: random.Random, median: float, sigma: float, most: int) -> int:
    return min(max(round(rng.lognormvariate(math.log(median), sigma)), 1), most)
