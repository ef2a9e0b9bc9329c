"""Time of the sampler in a decode step, and what each feature adds to it when every row of the batch uses it.

    python tests/benchmarks/sampler_step.py [--rows 64] [--vocab-size 8192] [--tokens 512] [--steps 30]
    python tests/benchmarks/sampler_step.py --against CHECKOUT

"one row" has the feature in a single row: its cost to the others. With --against the same benchmark of another checkout
runs before and after this one, for the features that it has; "before" is the mean of the two.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch
from pagestream_engine.sampler import SamplingBatch
from pagestream_engine.sampling_params import SamplingParams

PROMPT_TOKENS = 128
FEATURES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 0.8},
    "top-k": {"temperature": 0.8, "top_k": 50},
    "top-p": {"temperature": 0.8, "top_p": 0.9},
    "min-p": {"temperature": 0.8, "min_p": 0.05},
    "logit_bias of 10": {"logit_bias": dict.fromkeys(range(10), 1.0)},
    "100 allowed tokens": {"allowed_token_ids": list(range(100))},
    "10 bad words": {"bad_words_token_ids": [[token, token + 1] for token in range(10)]},
    "presence + frequency": {"presence_penalty": 0.5, "frequency_penalty": 0.5},
    "repetition": {"repetition_penalty": 1.2},
    "logprobs=0": {"logprobs": 0},
    "logprobs=5": {"logprobs": 5},
    "everything": {"temperature": 0.8, "repetition_penalty": 1.2, "presence_penalty": 0.5, "logprobs": 5},
}


def make_batch(params: Sequence[SamplingParams], num_tokens: int, vocab_size: int) -> SamplingBatch:
    """Return a batch of sequences of random tokens."""
    shape, generator = (len(params), num_tokens), torch.Generator().manual_seed(0)
    tokens = torch.randint(0, vocab_size, shape, generator=generator).numpy()
    batch = SamplingBatch(len(params), vocab_size, torch.device("cpu"))
    for row, (own, token_ids) in enumerate(zip(params, tokens, strict=True)):
        batch.add(
            row,
            own,
            seed=row,
            end_token_ids=(),
            prompt_token_ids=token_ids[:PROMPT_TOKENS],
            output_token_ids=token_ids[PROMPT_TOKENS:],
        )
    return batch


def milliseconds(run: Callable[[], object], num_steps: int) -> float:
    """Return the median of the steps without the first one."""
    run()
    times = []
    for _ in range(num_steps):
        start = perf_counter()
        run()
        times.append((perf_counter() - start) * 1e3)
    return median(times)


def measure(options: argparse.Namespace) -> dict[str, tuple[float, float]]:
    """Return each feature's milliseconds a step: in all rows, and in one."""
    num_rows, vocab_size = options.rows, options.vocab_size
    logits = torch.randn(num_rows, vocab_size).bfloat16()
    rows = np.arange(num_rows)
    plain = SamplingParams(temperature=0.0, max_tokens=None)
    figures = {}
    for name, given in FEATURES.items():
        params = SamplingParams(**{"temperature": 0.0, "max_tokens": None, **given})
        every, one = (
            make_batch(kinds, options.tokens, vocab_size)
            for kinds in ([params] * num_rows, [plain] * (num_rows - 1) + [params])
        )
        all_ms, one_ms = (
            milliseconds(lambda batch=batch: batch.sample(logits, rows).token_ids.tolist(), options.steps)
            for batch in (every, one)
        )
        figures[name] = (all_ms, one_ms)
    return figures


def measured_by(checkout: Path, arguments: Sequence[str]) -> dict[str, float]:
    """Run another checkout's benchmark with its own sources. Return milliseconds a step with a feature in all rows."""
    sources = [str(folder) for folder in (*checkout.glob("services/*/src"), checkout / "kernels" / "src")]
    done = subprocess.run(
        [sys.executable, str(checkout / "tests" / "benchmarks" / "sampler_step.py"), *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sources)},
        capture_output=True,
        text=True,
        check=True,
    )
    lines = [line.rsplit(maxsplit=2) for line in done.stdout.splitlines()[2:]]
    return {name.strip(): float(all_ms) for name, all_ms, _ in lines}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--vocab-size", type=int, default=8192)
    parser.add_argument("--tokens", type=int, default=512, help="of each sequence, its prompt included")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--against", type=Path, metavar="CHECKOUT")
    options = parser.parse_args()
    names = ("rows", "vocab_size", "tokens", "steps")
    arguments = [f"--{name.replace('_', '-')}={getattr(options, name)}" for name in names]
    first = measured_by(options.against, arguments) if options.against else {}
    figures = measure(options)
    last = measured_by(options.against, arguments) if options.against else {}
    print(f"{options.rows} rows, vocabulary of {options.vocab_size}, {options.tokens} tokens each, milliseconds a step")
    print(f"{'':22s}{'all rows':>10s}{'one row':>10s}" + f"{'before':>10s}{'ratio':>8s}" * bool(options.against))
    for name, (all_ms, one_ms) in figures.items():
        line = f"{name:22s}{all_ms:10.3f}{one_ms:10.3f}"
        if name in first:
            before = (first[name] + last[name]) / 2
            line += f"{before:10.3f}{all_ms / before:8.2f}"
        print(line)


if __name__ == "__main__":
    torch.inference_mode()(main)()
