"""Notes what comes of one request, whatever it was sent over."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Protocol

from pagestream_cli.bench.stats import Outcome
from pagestream_cli.bench.workload import BenchRequest


class AnswerError(Exception):
    """An answer that counts as an error, of a kind."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass
class Tally:
    """What came of one answer so far."""

    began: float
    times_s: list[float] = field(default_factory=list)
    output_tokens: int = 0
    input_tokens: int | None = None
    done: bool = False


class LoadClient(Protocol):
    """A way to the server."""

    async def ask(self, request: BenchRequest, tally: Tally) -> None:
        """Send a request and note what comes of it."""

    async def close(self) -> None:
        """Let go of connections."""


def outcome_of(request: BenchRequest, tally: Tally, start: float, error: tuple[str, str] = ("", "")) -> Outcome:
    """The request's measurements, `start` being the run's."""
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
