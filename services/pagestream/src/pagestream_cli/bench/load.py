"""The load of a run: requests from prompts, lengths or a trace, each of which is sent when it is due, and measured."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from pagestream_simulator.errors import InputFileInvalidError
from pagestream_simulator.load import TraceRow

from pagestream_cli.bench.options import LengthRange
from pagestream_cli.bench.results import INTERRUPTED, Outcome

Prompt = str | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One request to send."""

    due_s: float
    """Seconds after the start of the run."""
    prompt: Prompt
    """Text, or token ids, which need no tokenizer here."""
    max_tokens: int
    ignore_eos: bool
    """Whether the answer must have exactly `max_tokens`."""


def from_prompts(path: Path, output_len: LengthRange, rng: random.Random, limit: int | None) -> list[BenchRequest]:
    """Make one request of each line of a file: plain text, or JSON objects with `prompt` and perhaps `max_tokens`.

    Where `limit` is larger than the number of lines, the lines are repeated.

    Raises:
        InputFileInvalidError: the file cannot be read or holds no prompts.
    """
    try:
        lines = [line for line in path.read_text().splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise InputFileInvalidError(f"cannot read {path}: {error}") from error
    if not lines:
        raise InputFileInvalidError(f"{path} has no prompts")
    chosen = [lines[i % len(lines)] for i in range(len(lines) if limit is None else limit)]
    return [_from_line(line, path, rng.randint(*output_len)) for line in chosen]


def from_random(
    count: int, input_len: LengthRange, output_len: LengthRange, vocab_size: int, rng: random.Random
) -> list[BenchRequest]:
    """Make requests of uniformly drawn lengths and tokens."""
    return [
        BenchRequest(
            0.0, random_tokens(rng.randint(*input_len), vocab_size, rng), rng.randint(*output_len), ignore_eos=True
        )
        for _ in range(count)
    ]


def from_trace(rows: Sequence[TraceRow], vocab_size: int, time_scale: float, seed: int) -> list[BenchRequest]:
    """Make requests with the lengths and arrivals of a trace. Blocks of equal hash ids become equal prompt tokens."""
    return [
        BenchRequest(
            row.arrival_s / time_scale,
            _trace_tokens(row, vocab_size, random.Random(f"{seed}/{index}"), seed),
            row.output_tokens,
            ignore_eos=True,
        )
        for index, row in enumerate(rows)
    ]


def with_poisson(requests: Sequence[BenchRequest], rate: float, rng: random.Random) -> list[BenchRequest]:
    """Return the same requests with Poisson arrivals of `rate` per second."""
    return [
        replace(request, due_s=due) for request, due in zip(requests, poisson(len(requests), rate, rng), strict=True)
    ]


def poisson(count: int, rate: float, rng: random.Random) -> list[float]:
    """Draw `count` arrivals of a Poisson process of `rate` per second, in seconds; the first is at 0."""
    now = 0.0
    arrivals = [now]
    while len(arrivals) < count:
        now += rng.expovariate(rate)
        arrivals.append(now)
    return arrivals[:count]


def random_tokens(count: int, vocab_size: int, rng: random.Random) -> tuple[int, ...]:
    """Draw token ids below `vocab_size`."""
    return tuple(rng.choices(range(vocab_size), k=count))


def _trace_tokens(row: TraceRow, vocab_size: int, rng: random.Random, seed: int) -> tuple[int, ...]:
    tokens: list[int] = []
    for block in row.blocks:
        if len(tokens) >= row.input_tokens:
            break
        tokens += random_tokens(row.block_tokens, vocab_size, random.Random(f"{seed}/block/{block}"))
    tokens += random_tokens(max(row.input_tokens - len(tokens), 0), vocab_size, rng)
    return tuple(tokens[: row.input_tokens])


def _from_line(line: str, path: Path, max_tokens: int) -> BenchRequest:
    if path.suffix != ".jsonl":
        return BenchRequest(0.0, line, max_tokens, ignore_eos=False)
    try:
        content = json.loads(line)
        prompt = content["prompt"]
        if not isinstance(prompt, str):
            prompt = tuple(int(token) for token in prompt)
        return BenchRequest(0.0, prompt, int(content.get("max_tokens", max_tokens)), ignore_eos=False)
    except (ValueError, KeyError, TypeError) as error:
        form = '{"prompt": ..., "max_tokens": ...}'
        raise InputFileInvalidError(f"{path}: a line is not {form}: {line[:80]}") from error


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
