"""Speed with drafts by n-grams against without, on the reference model (engine_throughput.py), in turns in one run.

Two texts: greedy output of random weights falls into a loop, so that nearly every draft holds; at temperature 1 it is
noise in which hardly two tokens stand twice, so that drafts can only cost time. A third lies between: noise that takes
up its own words, by a bias on 40 tokens. Tokens are compared where the engine is deterministic.

    PYTHONPATH=tests python tests/benchmarks/speculation.py [--rounds 3] [--streams 1 8 64] [--output-tokens 128]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from engine_throughput import make_model, make_prompts
from goals import print_goal
from pagestream_engine import LLM, SamplingParams

TEXTS: dict[str, dict[str, Any]] = {
    "loop": {"temperature": 0.0},
    "few words": {"temperature": 0.7, "logit_bias": dict.fromkeys(range(100, 140), 12.0)},
    "noise": {"temperature": 1.0},
}


def timed(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> tuple[float, list[list[int]]]:
    """Return seconds, and the tokens of each output."""
    started = time.perf_counter()
    outputs = llm.generate(prompts, params)
    return time.perf_counter() - started, [output.outputs[0].token_ids for output in outputs]


def main() -> None:
    """Print a row for each text and number of streams."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = str(make_model(Path(folder), args.dtype))
        options = {"max_num_seqs": 64, "enable_prefix_caching": False}
        plain, drafting = LLM(path, **options), LLM(path, **options, speculative_method="ngram")
        print(f"deterministic: {plain.engine.is_deterministic}")
        print("| text | streams | drafts a token | accepted | speed, of without |\n|---|---|---|---|---|")
        for text, settings in TEXTS.items():
            for streams in args.streams:
                prompts = make_prompts(streams)
                params = [
                    SamplingParams(max_tokens=args.output_tokens, ignore_eos=True, seed=seed, **settings)
                    for seed in range(streams)
                ]
                before, ratios = drafting.engine.stats(), []
                for _ in range(args.rounds):
                    without_s, expected = timed(plain, prompts, params)
                    with_s, tokens = timed(drafting, prompts, params)
                    ratios.append(without_s / with_s)
                    if plain.engine.is_deterministic and tokens != expected:
                        raise SystemExit(f"{text}, {streams} streams: the tokens differ")
                after = drafting.engine.stats()
                drafted = after.num_draft_tokens - before.num_draft_tokens
                accepted = after.num_accepted_tokens - before.num_accepted_tokens
                num_tokens = args.rounds * streams * args.output_tokens
                share = accepted / drafted if drafted else 0.0
                ratio = median(ratios)
                print(f"| {text} | {streams} | {drafted / num_tokens:.2f} | {share:.0%} | {ratio:.2f} |", flush=True)
                if text == "loop" and streams == 1:
                    print_goal("one stream that repeats itself, with drafts", ">= 1.8", f"{ratio:.2f}")
                if text == "noise":
                    print_goal(f"{streams} streams of noise, with drafts", ">= 0.98", f"{ratio:.2f}")


if __name__ == "__main__":
    main()
