"""What is recorded of one request, over either protocol."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Protocol

from pagestream_cli.bench.stats import Outcome
from pagestream_cli.bench.workload import BenchRequest


class AnswerError(Exception):
    """An answer that counts as an error; `kind` groups errors in the summary."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass
class Tally:
    """What one answer has brought so far."""

    began: float
    times_s: list[float] = field(default_factory=list)
    output_tokens: int = 0
    input_tokens: int | None = None
    done: bool = False


class LoadClient(Protocol):
    """Sends bench requests over one protocol."""

    async def ask(self, request: BenchRequest, tally: Tally) -> None:
        """Send a request and record its answer in the tally."""

    async def close(self) -> None:
        """Close the connections."""


def outcome_of(request: BenchRequest, tally: Tally, start: float, error: tuple[str, str] = ("", "")) -> Outcome:
    """Return the measurements of a request; `start` is the start of the run on the clock of `tally.began`."""
    prompt_tokens = len(request.prompt) if not isinstance(request.prompt, str) else 0
    kind, message = error
    if not kind and request.ignore_eos and tally.output_tokens != request.max_tokens:
        kind, message = "wrong length", f"{tally.output_tokens} tokens instead of {request.max_tokens}"
    return Outcome(
        due_s=request.due_s,
        sent_s=tally.began - start,
        ended_s=time.perf_counter() - start,
        input_tokens=tally.input_tokens if tally.input_tokens is not None else prompt_tokens,
        output_tokens=tally.output_tokens,
        token_times_s=tuple(tally.times_s),
        error=kind,
        message=message[:300],
    )
