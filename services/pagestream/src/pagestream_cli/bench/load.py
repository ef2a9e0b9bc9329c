"""The load: each request is sent when it is due."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from pagestream_cli.bench.measurement import AnswerError, LoadClient, ResponseMeasurement, outcome_of
from pagestream_cli.bench.stats import INTERRUPTED, Outcome
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
