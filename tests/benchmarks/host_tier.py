"""What blocks in host memory save on a CPU: prompts that come again after the pool has lost them.

    PYTHONPATH=tests python tests/benchmarks/host_tier.py [--rounds 3] [--short]

The demo model, one prompt after the other, each with an answer of one token; a pool that holds a fourth of them. The
engines with and without `swap_space` take each round in turn.
"""

from __future__ import annotations

import argparse
from random import Random
from statistics import median
from time import perf_counter

from pagestream_cli.serve.model import find_demo_model
from pagestream_engine import LLM, SamplingParams

NUM_PROMPTS = 24
PROMPT_TOKENS = 768
BLOCK_SIZE = 16


def make_llm(swap_space: float) -> LLM:
    """Return an engine whose pool holds a fourth of the prompts."""
    num_blocks = NUM_PROMPTS * PROMPT_TOKENS // BLOCK_SIZE // 4
    options = {"device": "cpu", "block_size": BLOCK_SIZE, "num_gpu_blocks_override": num_blocks}
    return LLM(str(find_demo_model()), swap_space=swap_space, **options)


def seconds(llm: LLM, prompts: list[list[int]]) -> float:
    """Return the mean seconds of a prompt."""
    start = perf_counter()
    for prompt in prompts:
        llm.generate([prompt], SamplingParams(temperature=0, max_tokens=1))
    return (perf_counter() - start) / len(prompts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--short", action="store_true", help="one round")
    options = parser.parse_args()
    llms = {name: make_llm(swap_space) for name, swap_space in (("computed again", 0.0), ("from host memory", 1.0))}
    generator = Random(1)
    vocab_size = next(iter(llms.values())).engine.vocab_size
    prompts = [[generator.randrange(3, vocab_size) for _ in range(PROMPT_TOKENS)] for _ in range(NUM_PROMPTS)]
    for llm in llms.values():
        seconds(llm, prompts)
    times: dict[str, list[float]] = {name: [] for name in llms}
    for _ in range(1 if options.short else options.rounds):
        for name, llm in llms.items():
            times[name].append(seconds(llm, prompts))
    for name, llm in llms.items():
        stats = llm.engine.stats()
        print(f"{name}: {median(times[name]) * 1e3:.1f} ms a prompt, {stats.loaded_bytes / 2**20:,.0f} MiB loaded")


if __name__ == "__main__":
    main()
