"""The load: each request is sent when it is due, and measured."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from pagestream_cli.bench.results import INTERRUPTED, Outcome
from pagestream_cli.bench.workload import BenchRequest


async def run_load(
    client: LoadClient,
    requests: Sequence[BenchRequest],
    *,
    concurrency: int | None,
    timeout_s: float,
    on_done: Callable[[Outcome], None],
) -> list[Outcome]:
    """Send every request when it is due, and wait for all answers.

    Args:
        concurrency: most requests at once; None is no limit.
        timeout_s: longest time for one answer.
        on_done: called with each outcome.

    Returns:
        The outcomes in the order of sending. An error is an outcome, never an exception: the load continues. Where the
        task is cancelled (Ctrl-C), those of the requests that were sent until then: those under way are broken off, as
        INTERRUPTED.
    """
    start = time.perf_counter()
    slots = asyncio.Semaphore(concurrency) if concurrency is not None else contextlib.nullcontext()

    async def one(request: BenchRequest) -> Outcome:
        asked = time.perf_counter()
        async with slots:
            waited_s = time.perf_counter() - asked
            outcome = replace(await _ask(client, request, start, timeout_s), waited_s=waited_s)
        if outcome.error != INTERRUPTED:
            on_done(outcome)
        return outcome

    tasks: list[asyncio.Task[Outcome]] = []
    try:
        async with asyncio.TaskGroup() as group:
            for request in sorted_by_due(requests):
                delay_s = start + request.due_s - time.perf_counter()
                if delay_s > 0:
                    await asyncio.sleep(delay_s)
                tasks.append(group.create_task(one(request)))
    except asyncio.CancelledError:
        current = asyncio.current_task()
        if current is None or all(task.cancelled() for task in tasks):
            raise  # nothing was sent
        current.uncancel()
    return [task.result() for task in tasks if not task.cancelled()]


def sorted_by_due(requests: Sequence[BenchRequest]) -> list[BenchRequest]:
    """Return the requests in the order in which they are sent."""
    return sorted(requests, key=lambda request: request.due_s)


async def _ask(client: LoadClient, request: BenchRequest, start: float, timeout_s: float) -> Outcome:
    measurement = ResponseMeasurement(began_s=time.perf_counter())
    error = ("", "")
    try:
        async with asyncio.timeout(timeout_s):
            await client.ask(request, measurement)
    except AnswerError as failure:
        error = (failure.kind, str(failure))
    except TimeoutError:
        error = ("timeout", f"no complete answer within {timeout_s:.0f} s")
    except OSError as failure:
        error = ("connection", str(failure))
    except asyncio.CancelledError:  # the load ends with what was measured
        error = (INTERRUPTED, "")
    return outcome_of(request, measurement, start, error)


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
