"""Time of the sampler in a decode step, and what each feature adds to it when every row of the batch uses it.

    python tests/benchmarks/sampler_step.py [--rows 64] [--vocab-size 8192] [--tokens 512] [--steps 30]

"one row" has the feature in a single row: its cost to the others.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any

import torch
from pagestream_engine.request.sampling_params import SamplingParams
from pagestream_engine.request.sequence import Sequence
from pagestream_engine.sampler import sample

PROMPT_TOKENS = 128
FEATURES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 0.8},
    "logit_bias of 10": {"logit_bias": dict.fromkeys(range(10), 1.0)},
    "presence + frequency": {"presence_penalty": 0.5, "frequency_penalty": 0.5},
    "repetition": {"repetition_penalty": 1.2},
    "logprobs=0": {"logprobs": 0},
    "logprobs=5": {"logprobs": 5},
    "everything": {"temperature": 0.8, "repetition_penalty": 1.2, "presence_penalty": 0.5, "logprobs": 5},
}


def make_rows(count: int, num_tokens: int, vocab_size: int, params: SamplingParams) -> list[Sequence]:
    """Return sequences of random tokens."""
    tokens = torch.randint(0, vocab_size, (count, num_tokens), generator=torch.Generator().manual_seed(0)).tolist()
    return [
        Sequence(
            str(row),
            tokens[row][:PROMPT_TOKENS],
            params,
            seed=row,
            arrival=row,
            max_total_tokens=1 << 30,
            output_token_ids=tokens[row][PROMPT_TOKENS:],
        )
        for row in range(count)
    ]


def step(logits: torch.Tensor, rows: list[Sequence]) -> Callable[[], None]:
    """Run one decode step, which appends a token to each row."""

    def run() -> None:
        for seq, token_id in zip(rows, sample(logits, rows, ()).token_ids, strict=True):
            seq.token_ids.append(token_id)

    return run


def milliseconds(run: Callable[[], None], num_steps: int) -> float:
    """Return the median of the steps without the first one, which counts the sequences' earlier tokens."""
    run()
    times = []
    for _ in range(num_steps):
        start = perf_counter()
        run()
        times.append((perf_counter() - start) * 1e3)
    return median(times)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--vocab-size", type=int, default=8192)
    parser.add_argument("--tokens", type=int, default=512, help="of each sequence, its prompt included")
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    logits = torch.randn(options.rows, options.vocab_size).bfloat16()
    print(f"{options.rows} rows, vocabulary of {options.vocab_size}, {options.tokens} tokens each, milliseconds a step")
    print(f"{'':22s}{'all rows':>10s}{'one row':>10s}")
    plain = SamplingParams(temperature=0.0, max_tokens=None)
    for name, given in FEATURES.items():
        params = SamplingParams(**{"temperature": 0.0, "max_tokens": None, **given})
        every = make_rows(options.rows, options.tokens, options.vocab_size, params)
        one = [
            *make_rows(options.rows, options.tokens, options.vocab_size, plain)[1:],
            make_rows(1, options.tokens, options.vocab_size, params)[0],
        ]
        all_ms, one_ms = (milliseconds(step(logits.clone(), rows), options.steps) for rows in (every, one))
        print(f"{name:22s}{all_ms:10.3f}{one_ms:10.3f}")


if __name__ == "__main__":
    torch.inference_mode()(main)()
