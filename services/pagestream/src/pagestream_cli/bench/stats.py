"""From single requests to latencies and throughput."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy

PERCENTILES = (50.0, 90.0, 99.0)
INTERRUPTED = "interrupted"
"""Kind of the error of a request that the user broke off."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One request, as its client saw it. Times are in seconds."""

    due_s: float
    """When it was due, after the start of the run."""
    sent_s: float
    """When it was sent, after the start of the run."""
    ended_s: float
    """When its answer, or its error, was complete, after the start of the run."""
    input_tokens: int
    output_tokens: int
    token_times_s: tuple[float, ...] = ()
    """When each event with tokens came, after `sent_s`."""
    error: str = ""
    """Kind of the error; empty where there is none."""
    message: str = ""
    waited_s: float = 0.0
    """How long it waited for another request to end, as a bound on requests at once asks for (a closed loop)."""

    @property
    def e2e_s(self) -> float:
        """Time from sending to the end."""
        return self.ended_s - self.sent_s

    @property
    def ttft_s(self) -> float | None:
        """Time to first token."""
        return self.token_times_s[0] if self.token_times_s else None

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None for answers of one token."""
        if self.output_tokens < 2 or len(self.token_times_s) < 1:
            return None
        return (self.token_times_s[-1] - self.token_times_s[0]) / (self.output_tokens - 1)

    @property
    def itl_s(self) -> list[float]:
        """Inter-token latencies: gaps between events with tokens."""
        times = self.token_times_s
        return [later - earlier for earlier, later in itertools.pairwise(times)]


@dataclass(frozen=True)
class Spread:
    """Distribution of one measure over all requests, in milliseconds."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float


@dataclass(frozen=True)
class Summary:
    """Measurements of a run."""

    requests: int
    succeeded: int
    errors: dict[str, int]
    """Number by kind."""
    interrupted: int
    """Broken off by the user; their tokens count."""
    duration_s: float
    """From the first request sent to the last answer completed."""
    input_tokens: int
    output_tokens: int
    requests_per_s: float
    input_tokens_per_s: float
    output_tokens_per_s: float
    ttft: Spread | None
    """Time to first token; None where nothing was measured."""
    tpot: Spread | None
    """Time per output token after the first."""
    itl: Spread | None
    """Gaps between events with tokens."""
    e2e: Spread | None
    """Whole answers."""
    late: Spread | None
    """Delay of the load generator in sending, less what a closed loop asks for: where it is large, the generator was
    the limit, not the server."""


def spread(seconds: Sequence[float]) -> Spread | None:
    """Return the distribution of values in seconds, in milliseconds; None where there is no value."""
    if not seconds:
        return None
    low, middle, high = (float(each) * 1000 for each in numpy.percentile(seconds, PERCENTILES))
    return Spread(len(seconds), sum(seconds) / len(seconds) * 1000, low, middle, high, max(seconds) * 1000)


def summarize(outcomes: Sequence[Outcome]) -> Summary:
    """Return latencies and throughput of the requests that succeeded, and the errors of the others. What was broken off
    by the user counts as far as it came.
    """
    good = [outcome for outcome in outcomes if not outcome.error]
    measured = [outcome for outcome in outcomes if outcome.error in ("", INTERRUPTED)]
    duration = max((o.ended_s for o in outcomes), default=0.0) - min((o.sent_s for o in outcomes), default=0.0)
    inputs, outputs = sum(o.input_tokens for o in good), sum(o.output_tokens for o in measured)
    per_second = 1 / duration if duration > 0 else 0.0
    return Summary(
        requests=len(outcomes),
        succeeded=len(good),
        errors=dict(Counter(o.error for o in outcomes if o.error and o.error != INTERRUPTED)),
        interrupted=sum(o.error == INTERRUPTED for o in outcomes),
        duration_s=duration,
        input_tokens=inputs,
        output_tokens=outputs,
        requests_per_s=len(good) * per_second,
        input_tokens_per_s=inputs * per_second,
        output_tokens_per_s=outputs * per_second,
        ttft=spread([o.ttft_s for o in measured if o.ttft_s is not None]),
        tpot=spread([o.tpot_s for o in good if o.tpot_s is not None]),
        itl=spread([gap for o in measured for gap in o.itl_s]),
        e2e=spread([o.e2e_s for o in good]),
        late=spread([max(o.sent_s - o.due_s - o.waited_s, 0.0) for o in outcomes]),
    )
