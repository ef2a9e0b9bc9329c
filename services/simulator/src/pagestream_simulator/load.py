"""Loads: request traces (arrival times and lengths), read, written, made denser, and shrunk to a model's context.

Two published formats are read: the Azure LLM inference traces (csv with TIMESTAMP, ContextTokens, GeneratedTokens) and
the Mooncake traces (jsonl with timestamp in milliseconds, input_length, output_length, hash_ids).

`scale_to_context` lets a small model see the shape of a large one's traffic. All lengths are multiplied by one factor,
context / (99th percentile of prompt + output), never above 1: the proportions between requests and between prompt and
output stay. The one request in a hundred that is still too long is shrunk further, to the context. No length falls
below one token.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

import numpy as np
import numpy.typing as npt
from pagestream_engine.scheduler.policies import LengthPredictor, RequestShape

from pagestream_simulator.errors import InputFileInvalidError, SettingInvalidError

CSV_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
MOONCAKE_BLOCK_TOKENS = 512
"""Prompt tokens in a block of `hash_ids`, as published with the traces."""
SAMPLE = "sample"
"""Name of this package's own trace."""


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request of a trace."""

    arrival_s: float
    """Seconds after the first one."""
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    """Ids of the prompt's blocks: equal ids are equal tokens. Empty: unknown."""
    block_tokens: int = MOONCAKE_BLOCK_TOKENS


def sample_path() -> Path:
    """Return the path of this package's own trace."""
    return Path(__file__).resolve().parent / "data" / "sample_trace.csv"


def read_trace(name: str, limit: int | None = None) -> list[TraceRow]:
    """Read the first `limit` requests of a trace, in order of arrival, with the first one at second 0.

    Args:
        name: path of a .csv (Azure) or .jsonl (Mooncake) file, or `sample`.
        limit: most requests to read; None reads all.

    Raises:
        InputFileInvalidError: the file can't be read or is malformed; the message names the line.
    """
    path = sample_path() if name == SAMPLE else Path(name)
    try:
        with path.open(newline="") as lines:
            rows = list(_take(_read_jsonl(lines) if path.suffix == ".jsonl" else _read_csv(lines), limit))
    except OSError as error:
        raise InputFileInvalidError(f"cannot read the trace {name}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputFileInvalidError(f"the trace {name} is not a text file") from error
    if not rows:
        raise InputFileInvalidError(f"the trace {name} has no requests")
    return _from_zero(rows)


def write_csv(rows: Iterable[tuple[datetime, int, int]], path: Path) -> None:
    """Write a trace in Azure's format."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(CSV_COLUMNS)
        writer.writerows((arrival.isoformat(sep=" ", timespec="microseconds"), *lengths) for arrival, *lengths in rows)


def _read_csv(lines: Iterable[str]) -> Iterator[TraceRow]:
    reader = csv.DictReader(lines)
    missing = [column for column in CSV_COLUMNS if column not in (reader.fieldnames or ())]
    if missing:
        raise InputFileInvalidError(
            f"the trace has no column {missing[0]}",
            hint=f"expected: {', '.join(CSV_COLUMNS)}; or a .jsonl file in Mooncake's format",
        )
    for row in reader:
        try:
            arrival = datetime.fromisoformat(row["TIMESTAMP"]).timestamp()
            yield _row(arrival, int(row["ContextTokens"]), int(row["GeneratedTokens"]))
        except (ValueError, TypeError) as error:
            raise InputFileInvalidError(f"line {reader.line_num} of the trace: {error}") from error


def _read_jsonl(lines: Iterable[str]) -> Iterator[TraceRow]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            yield _row(
                row["timestamp"] / 1000,
                int(row["input_length"]),
                int(row["output_length"]),
                tuple(row.get("hash_ids", ())),
            )
        except KeyError as error:
            raise InputFileInvalidError(f"line {number} of the trace has no {error}") from error
        except (ValueError, TypeError) as error:
            raise InputFileInvalidError(f"line {number} of the trace: {error}") from error


def _row(arrival_s: float, input_tokens: int, output_tokens: int, blocks: tuple[int, ...] = ()) -> TraceRow:
    if input_tokens < 0 or output_tokens < 0:
        raise ValueError("a length is negative")
    return TraceRow(arrival_s, max(input_tokens, 1), max(output_tokens, 1), blocks)


def _take(rows: Iterator[TraceRow], limit: int | None) -> Iterator[TraceRow]:
    for index, row in enumerate(rows):
        if limit is not None and index >= limit:
            return
        yield row


def _from_zero(rows: Sequence[TraceRow]) -> list[TraceRow]:
    ordered = sorted(rows, key=lambda row: row.arrival_s)
    first = ordered[0].arrival_s
    return [
        TraceRow(row.arrival_s - first, row.input_tokens, row.output_tokens, row.blocks, row.block_tokens)
        for row in ordered
    ]


PERCENTILE = 99.0
"""With the maximum instead, one outlier would make all others tiny: in the Azure conversation trace it is 3.3 times
this percentile.
"""


def scale_factor(rows: Sequence[TraceRow], context: int) -> float:
    """Return the factor for all lengths, at most 1."""
    return min(1.0, context / float(np.percentile([row.input_tokens + row.output_tokens for row in rows], PERCENTILE)))


def scale_to_context(rows: Sequence[TraceRow], context: int) -> list[TraceRow]:
    """Return the requests with prompt + output within `context` tokens.

    Raises:
        SettingInvalidError: `context` has no room for a prompt and an output.
    """
    if context < 2:
        raise SettingInvalidError(
            f"a context of {context} tokens has no room for a prompt and an output; at least 2 are expected"
        )
    factor = scale_factor(rows, context)
    return [_fit(row, factor, context) for row in rows]


def _fit(row: TraceRow, factor: float, context: int) -> TraceRow:
    own = min(factor, context / (row.input_tokens + row.output_tokens))
    output = min(max(round(row.output_tokens * own), 1), context - 1)
    prompt = min(max(round(row.input_tokens * own), 1), context - output)
    return replace(
        row, input_tokens=prompt, output_tokens=output, block_tokens=max(round(row.block_tokens * factor), 1)
    )


LEARNT_S = 30.0
"""Seconds from a request's arrival to the time at which gateways know its length: what an answer takes, about."""
_MOST_OUTPUT = 131_072


@dataclass(frozen=True, slots=True, eq=False)
class Load:
    """Requests in order of arrival, as arrays of equal length."""

    arrival_s: npt.NDArray[np.float64]
    prompt_tokens: npt.NDArray[np.int32]
    output_tokens: npt.NDArray[np.int32]
    partition: npt.NDArray[np.int32]
    """Partition of the queue, counted from 0."""

    def __len__(self) -> int:
        """Return the number of requests."""
        return len(self.arrival_s)

    @property
    def duration_s(self) -> float:
        """Seconds from the trace's begin to the last arrival."""
        return float(self.arrival_s[-1])


def expected_outputs(load: Load) -> npt.NDArray[np.int32]:
    """Return what a gateway would expect of each output, from requests that came at least LEARNT_S before."""
    predictor, expected, learnt = LengthPredictor(), np.zeros(len(load), dtype=np.int32), 0
    shapes = [RequestShape(int(tokens), "", _MOST_OUTPUT) for tokens in load.prompt_tokens]
    for number, arrival in enumerate(load.arrival_s):
        while load.arrival_s[learnt] < arrival - LEARNT_S:
            predictor.note_length(shapes[learnt], int(load.output_tokens[learnt]))
            learnt += 1
        expected[number] = round(predictor.expected_of(shapes[number])) if learnt else 0
    return expected


def scale_arrivals(
    rows: Sequence[TraceRow], factor: float, *, jitter_s: float, context_tokens: int, partitions: int, seed: int
) -> Load:
    """Return a load with `factor` times a trace's requests.

    The first copy of a request arrives when it did, the others up to `jitter_s` before or after, so that longer bursts
    keep their height. The fraction of `factor` is the probability of one more copy. Lengths are shrunk to
    `context_tokens`, as `pagestream bench --scale-to-context` does. Partitions are drawn, since all prompts differ.
    """
    rng = np.random.default_rng(seed)
    fitted = scale_to_context(rows, context_tokens)
    copies = np.floor(factor + rng.random(len(fitted))).astype(np.int64)
    index = np.repeat(np.arange(len(fitted)), copies)
    is_first = np.concatenate(([True], index[1:] != index[:-1])) if len(index) else np.zeros(0, dtype=bool)
    arrival = np.array([row.arrival_s for row in fitted])[index]
    moved = arrival + rng.uniform(-jitter_s, jitter_s, len(index))
    last = fitted[-1].arrival_s
    arrival = np.where(is_first, arrival, np.clip(moved, 0.0, last))
    order = np.argsort(arrival, kind="stable")
    index = index[order]
    return Load(
        arrival_s=np.ascontiguousarray(arrival[order]),
        prompt_tokens=np.array([row.input_tokens for row in fitted], dtype=np.int32)[index],
        output_tokens=np.array([row.output_tokens for row in fitted], dtype=np.int32)[index],
        partition=rng.integers(0, partitions, len(index), dtype=np.int32),
    )
