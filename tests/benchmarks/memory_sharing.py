"""What sharing of KV blocks saves: n choices of a prompt, beam searches, and prompts with a common beginning.

    PYTHONPATH=tests python tests/benchmarks/memory_sharing.py [--short]

The demo model on the engine as it is served. After each step: blocks that are held, beside the places of all block
tables that hold one, which is what the same sequences would take if each had blocks of its own. Saved is what is not
held of the latter, both added up over all steps. A request has as many tokens of prompt and output as the mean of
Alpaca (19 and 58), of ShareGPT (161 and 338; both as in vLLM's paper, https://arxiv.org/abs/2309.06180, 6.3) or, with
system prompts, what is named.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from random import Random

from pagestream_engine import LLM, SamplingParams
from pagestream_engine.plan import NO_BLOCK

MODEL = Path(__file__).parents[2] / "deploy/demo-model/model"
NUM_BLOCKS = 6000
BLOCK_SIZE = 16
MAX_NUM_SEQS = 64
SHAPES = {"19 + 58 (Alpaca)": (19, 58), "161 + 338 (ShareGPT)": (161, 338)}
CHOICES = (2, 4, 8, 16)
BEAMS = (2, 4, 8)
SYSTEM_PROMPTS = (80, 341, 800)
"""Tokens; the first two are the paper's, of one and of five examples before a question."""
QUESTION, ANSWER = 32, 64


@dataclass
class Use:
    """Blocks, added up over steps."""

    held: int = 0
    unshared: int = 0
    """Places of block tables."""

    @property
    def saved(self) -> float:
        """The share of what would be held without sharing that is not held."""
        return 1.0 - self.held / self.unshared


def measure(llm: LLM, prompts: Sequence[list[int]], params: SamplingParams) -> Use:
    """Run requests that all come at once."""
    engine, use = llm.engine, Use()
    scheduler, pool = engine._scheduler, engine._pool
    step = engine.step

    def counted() -> list:  # type: ignore[type-arg]
        outputs = step()
        use.held += pool.num_blocks - pool.num_free
        tables = chain.from_iterable(seq.block_tables for seq in scheduler.running())
        use.unshared += sum(block != NO_BLOCK for table in tables for block in table)
        return outputs

    engine.step = counted  # type: ignore[method-assign]
    try:
        llm.generate(prompts, params, use_tqdm=False)
    finally:
        engine.step = step  # type: ignore[method-assign]
    return use


def text_tokens(llm: LLM, rng: Random, count: int) -> list[int]:
    """Return the first tokens of a text of the demo model's village, after a random token: no two share a block."""
    tokenizer = llm.get_tokenizer()
    if tokenizer is None:
        raise RuntimeError("the demo model has no tokenizer")
    names = ["The keeper", "The baker", "A captain", "The cat", "Nobody", "The old boat", "A letter", "The harbour"]
    acts = ["of the lighthouse went to the harbour", "told a story about the boat", "saw a storm", "had a letter"]
    token_ids = [rng.randrange(300, tokenizer.get_vocab_size())]
    while len(token_ids) < count:
        token_ids += tokenizer.encode(f"{rng.choice(names)} {rng.choice(acts)}. ").ids
    return token_ids[:count]


def rows(llm: LLM, *, short: bool) -> list[tuple[str, str, float]]:
    """Measure all. Return workload, tokens and share saved of each."""
    rng, found = Random(1), []
    num_requests = 2 if short else 8
    for tokens, (num_prompt, num_output) in list(SHAPES.items())[: 1 if short else None]:
        for beams in BEAMS[:1] if short else BEAMS:
            prompts = [text_tokens(llm, rng, num_prompt) for _ in range(num_requests)]
            params = SamplingParams(use_beam_search=True, n=beams, max_tokens=num_output, ignore_eos=True)
            found.append((f"{beams} beams", tokens, measure(llm, prompts, params).saved))
        for n in CHOICES[:1] if short else CHOICES:
            prompts = [text_tokens(llm, rng, num_prompt) for _ in range(min(num_requests, MAX_NUM_SEQS // n))]
            params = SamplingParams(n=n, seed=1, max_tokens=num_output, ignore_eos=True)
            found.append((f"n = {n}", tokens, measure(llm, prompts, params).saved))
    for length in SYSTEM_PROMPTS[:1] if short else SYSTEM_PROMPTS:
        shared = text_tokens(llm, rng, length)
        prompts = [shared + text_tokens(llm, rng, QUESTION) for _ in range(8 if short else MAX_NUM_SEQS)]
        params = SamplingParams(seed=1, max_tokens=ANSWER, ignore_eos=True)
        use = measure(llm, prompts, params)
        found.append((f"{len(prompts)} requests, one system prompt", f"{length} + {QUESTION} + {ANSWER}", use.saved))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="one of each kind, with fewer requests")
    short = parser.parse_args().short
    llm = LLM(
        MODEL,
        dtype="float32",
        device="cpu",
        block_size=BLOCK_SIZE,
        num_gpu_blocks_override=NUM_BLOCKS,
        max_num_seqs=MAX_NUM_SEQS,
    )
    print("| requests | tokens of prompt and output | blocks saved |\n|---|---|---|")
    for workload, tokens, saved in rows(llm, short=short):
        print(f"| {workload} | {tokens} | {saved:.1%} |", flush=True)


if __name__ == "__main__":
    main()
