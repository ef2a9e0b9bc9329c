"""A stand-in for Mooncake's synthetic trace (`synthetic_trace.jsonl`, FAST 2025), for where that file can't be had.

Arrivals are a Poisson process of its rate. Its requests come from public sets of data, chats and long documents;
lengths here are log-normal with its medians and spreads. Blocks are unknown: fleets are simulated without prefix hits.
"""

from __future__ import annotations

import math
import random

from pagestream_simulator.traces.files import TraceRow

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
