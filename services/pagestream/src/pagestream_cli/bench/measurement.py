"""The measurements of one request, over either protocol."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Protocol

from pagestream_cli.bench.stats import INTERRUPTED, Outcome
from pagestream_cli.bench.workload import BenchRequest


class AnswerError(Exception):
    """An answer that counts as an error; `kind` groups errors in the summary."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass
class ResponseMeasurement:
    """What was measured of one response so far."""

    began_s: float
    """On the clock of `time.perf_counter`."""
    times_s: list[float] = field(default_factory=list)
    output_tokens: int = 0
    input_tokens: int | None = None
    done: bool = False


class LoadClient(Protocol):
    """Sends bench requests over one protocol."""

    async def ask(self, request: BenchRequest, measurement: ResponseMeasurement) -> None:
        """Send a request and record its answer in the measurement."""

    async def close(self) -> None:
        """Close the connections."""


def outcome_of(
    request: BenchRequest, measurement: ResponseMeasurement, start: float, error: tuple[str, str] = ("", "")
) -> Outcome:
    """Return the measurements of a request; `start` is the start of the run on the clock of `measurement.began_s`."""
    prompt_tokens = len(request.prompt) if not isinstance(request.prompt, str) else 0
    kind, message = error
    if not kind and request.ignore_eos and measurement.output_tokens != request.max_tokens:
        kind, message = "wrong length", f"{measurement.output_tokens} tokens instead of {request.max_tokens}"
    return Outcome(
        due_s=request.due_s,
        sent_s=measurement.began_s - start,
        ended_s=time.perf_counter() - start,
        input_tokens=measurement.input_tokens if measurement.input_tokens is not None else prompt_tokens,
        output_tokens=max(measurement.output_tokens, len(measurement.times_s) if kind == INTERRUPTED else 0),
        token_times_s=tuple(measurement.times_s),
        error=kind,
        message=message[:300],
    )
