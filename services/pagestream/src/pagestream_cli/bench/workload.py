"""The requests of a run, and when each is due."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pagestream_simulator.errors import InputFileInvalidError
from pagestream_simulator.traces import TraceRow

from pagestream_cli.bench.options import LengthRange

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
