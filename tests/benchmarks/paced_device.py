"""Throughput beside a device whose step takes a fixed time and none of the host's cores, against that device's limit.

    PYTHONPATH=tests python tests/benchmarks/paced_device.py [--short] [--step-ms 8] [--running 256]

A small Llama with random weights first runs all requests, and its tokens are kept. Then a device plays them back, by
request and position: it runs its steps one after another, each ends `--step-ms` after it was launched, or after the one
before it ended where that is later, and a step's tokens are known when it ends. On the host everything is real:
scheduler, plans, persistent batch, bookkeeping, text, stop strings and ends, as in `host_cost.py`. It runs with
`async_scheduling` on and off, and with the executor in this process and in its own, in turn. Text and ends of all
requests must be those of the true model.

There are twice as many requests as may run, so that one that ends is replaced by the next. The limit is one token of
each running sequence in each step's time, from the step in which all of them run to the last one with a full batch. It
counts what a step ahead computes for a sequence that has ended as lost.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter, sleep

import numpy as np
import torch
from goals import print_goal
from host_cost import BLOCK_SIZE, BatchRunner
from numpy.typing import NDArray
from pagestream_engine import Engine, EngineConfig, SamplingParams
from pagestream_engine.plan import PendingResult, StepPlan, StepResult
from support.engines.arithmetic_model import ArithmeticFacts
from support.engines.tiny_models import VOCAB_SIZE, make_model

FACTS = ArithmeticFacts(vocab_size=VOCAB_SIZE, max_position_embeddings=1024, eos_token_ids=(2,))
PROMPT_LENS = (32, 255)
OUTPUT_LENS = (128, 384)
"""Most tokens of each request: from, to."""
STOP_STRING = "e"
"""Of every other request. By chance a text has it after some three hundred tokens, and as many end by themselves."""
WARM_UP_STEPS = 10
GOAL = 0.98
"""Share of the limit, with two steps in flight."""


@dataclass(frozen=True)
class Request:
    """What is asked of both models."""

    prompt: Sequence[int]
    params: SamplingParams
    """Its seed is the request's number, by which the device knows it."""


@dataclass(frozen=True)
class Outcome:
    """What became of a request."""

    text: str
    finish_reason: str | None
    stop_reason: int | str | None


@dataclass(frozen=True)
class Run:
    """A run of all requests."""

    outcomes: list[Outcome]
    token_ids: list[list[int]]
    steps: list[tuple[float, int]]
    """When each step was taken, and its tokens."""


class PacedDevice(BatchRunner):
    """Launches steps that take a fixed time, one after another, and no processor. Its tokens are given.

    Args:
        tokens: (requests, most) int64: of each request its output, then anything.
    """

    def __init__(
        self, _folder: Path, config: EngineConfig, *, step_s: float, max_model_len: int, tokens: NDArray[np.int64]
    ) -> None:
        super().__init__(config, max_model_len, FACTS)
        self._step_s = step_s
        self._ends = 0.0
        """When the last launched step ends."""
        self._tokens = tokens
        num_rows = config.scheduler.max_num_seqs
        self._requests = np.zeros(num_rows, np.int64)
        self._places = np.zeros(num_rows, np.int64)
        """Of each row of the batch its request, and the next token's index in its output."""

    def execute(self, plan: StepPlan) -> PendingResult:
        for new in plan.added:
            self._requests[new.row] = new.seed
            self._places[new.row] = len(new.token_ids) - new.num_prompt_tokens
        pending = super().execute(plan)
        self._ends = max(self._ends, perf_counter()) + self._step_s
        return partial(_wait, self._ends, pending)

    def next_token_ids(self, plan: StepPlan, _sampled_rows: torch.Tensor) -> torch.Tensor:
        rows = plan.sampled_rows
        # What follows an end is dropped.
        places = np.minimum(self._places[rows], self._tokens.shape[1] - 1)
        self._places[rows] += 1
        return torch.from_numpy(self._tokens[self._requests[rows], places])


def _wait(ends: float, pending: PendingResult) -> StepResult:
    sleep(max(0.0, ends - perf_counter()))
    return pending()


def make_requests(count: int, most: int | None) -> list[Request]:
    """Return requests of random lengths.

    Args:
        count: how many.
        most: tokens of the longest output; None: the last of OUTPUT_LENS.
    """
    generator = random.Random(0)
    requests = []
    for number in range(count):
        prompt = [generator.randrange(3, VOCAB_SIZE) for _ in range(generator.randint(*PROMPT_LENS))]
        params = SamplingParams(
            temperature=1.0,
            seed=number,
            stop=STOP_STRING if number % 2 else None,
            max_tokens=most or generator.randint(*OUTPUT_LENS),
        )
        requests.append(Request(prompt, params))
    return requests


def engine_options(num_running: int, max_model_len: int, **others: object) -> EngineConfig:
    """Return the settings of both engines: everything fits, and a prompt is computed in one step."""
    return EngineConfig.from_options(
        {
            "max_num_seqs": num_running,
            "max_num_batched_tokens": num_running * PROMPT_LENS[1],
            "max_model_len": max_model_len,
            "num_gpu_blocks_override": num_running * (max_model_len // BLOCK_SIZE + 2),
            **others,
        }
    )


def run(engine: Engine, requests: Sequence[Request]) -> Run:
    """Run all requests to their ends."""
    texts, token_ids = [""] * len(requests), [list[int]() for _ in requests]
    ends: list[tuple[str | None, int | str | None]] = [(None, None)] * len(requests)
    steps = []
    for number, request in enumerate(requests):
        engine.add_request(str(number), request.prompt, request.params)
    while engine.has_unfinished_requests():
        outputs = engine.step()
        for output in outputs:
            number = int(output.seq_id)
            texts[number] += output.text
            if output.token_id is not None:
                token_ids[number].append(output.token_id)
            if output.finish_reason is not None:
                ends[number] = output.finish_reason, output.stop_reason
        if outputs:
            steps.append((perf_counter(), len(outputs)))
    outcomes = [Outcome(text, *end) for text, end in zip(texts, ends, strict=True)]
    return Run(outcomes, token_ids, steps)


def share(found: Run, num_running: int, step_s: float) -> float:
    """Return the share of the device's limit, over the steps with a full batch.

    Raises:
        RuntimeError: there are too few of them.
    """
    begun = next(index for index, (_, count) in enumerate(found.steps) if count == num_running) + WARM_UP_STEPS
    last = max(index for index, (_, count) in enumerate(found.steps) if count == num_running)
    if last - begun < WARM_UP_STEPS:
        raise RuntimeError(f"given {last - begun} steps with a full batch, expected at least {WARM_UP_STEPS}")
    num_tokens = sum(count for _, count in found.steps[begun + 1 : last + 1])
    return num_tokens * step_s / num_running / (found.steps[last][0] - found.steps[begun][0])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="one round of short outputs")
    parser.add_argument("--step-ms", type=float, default=8.0)
    parser.add_argument("--running", type=int, default=256)
    options = parser.parse_args()
    num_rounds, most = (1, 40) if options.short else (5, None)
    requests = make_requests(2 * options.running, most)
    max_model_len = PROMPT_LENS[1] + OUTPUT_LENS[1] + BLOCK_SIZE
    kinds = [(executor, is_async) for executor in ("inline", "process") for is_async in (True, False)]
    shares: dict[tuple[str, bool], list[float]] = {kind: [] for kind in kinds}
    with tempfile.TemporaryDirectory() as name:
        folder = make_model(Path(name) / "model", "llama", max_position_embeddings=FACTS.max_position_embeddings)
        engine = Engine(folder, engine_options(options.running, max_model_len))
        true = run(engine, requests)
        engine.close()
        kept = np.zeros((len(requests), max(map(len, true.token_ids))), np.int64)
        for row, token_ids in zip(kept, true.token_ids, strict=True):
            row[: len(token_ids)] = token_ids
        make_runner = partial(PacedDevice, step_s=options.step_ms / 1e3, max_model_len=max_model_len, tokens=kept)
        for _ in range(num_rounds):
            for executor, is_async in kinds:
                config = engine_options(options.running, max_model_len, executor=executor, async_scheduling=is_async)
                engine = Engine(folder, config, make_runner=make_runner)
                try:
                    found = run(engine, requests)
                finally:
                    engine.close()
                if found.outcomes != true.outcomes:
                    raise RuntimeError("given other texts or ends than the true model's, expected the same")
                shares[executor, is_async].append(share(found, options.running, options.step_ms / 1e3))
    reasons = [outcome.finish_reason for outcome in true.outcomes]
    ends = ", ".join(f"{reasons.count(reason)} by {reason}" for reason in ("stop", "length"))
    print(f"{len(requests)} requests, {sum(map(len, true.token_ids))} tokens; they end {ends}")
    for (executor, is_async), found_shares in shares.items():
        name = f"executor {executor}, async_scheduling {'on' if is_async else 'off'}"
        lowest, highest = min(found_shares), max(found_shares)
        print(f"{name}: {median(found_shares):.1%} of the limit (lowest {lowest:.1%}, highest {highest:.1%})")
        if is_async:
            what = f"{options.running} running, {options.step_ms:g} ms a step, {name}"
            print_goal(what, f"{GOAL:.0%} of the limit", f"{median(found_shares):.1%}")


if __name__ == "__main__":
    main()
