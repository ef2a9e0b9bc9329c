"""What a KV cache of fewer bits costs in quality: perplexity of the demo model, and agreement of its greedy tokens.

    PYTHONPATH=tests:deploy/demo-model python tests/benchmarks/kv_cache_dtype.py [--texts 48] [--short]

Texts are drawn as those of the training were, with another seed. Perplexity: of their tokens behind the first 32, given
what comes before, computed in chunks of 64 tokens. Agreement: of 64 greedy tokens after the first 48 of each text, how
many are those of the cache in float32 before the first that differs, and how many texts have no such token.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from math import exp
from random import Random

from pagestream_cli.serve.model import find_demo_model
from pagestream_engine import LLM, SamplingParams
from stories import draw_cast, long_story

SEED = 20_261_123
CONTEXT = 384
FIRST = 32
START = 48
NUM_GREEDY = 64


@dataclass(frozen=True)
class Variant:
    """An engine's options."""

    name: str
    dtype: str
    kv_cache_dtype: str
    block_size: int = 16


VARIANTS = (
    Variant("float32", "float32", "auto"),
    Variant("float32, cache bfloat16", "float32", "bfloat16"),
    Variant("float32, cache fp8", "float32", "fp8"),
    Variant("float32, cache fp8, blocks of 64", "float32", "fp8", 64),
    Variant("bfloat16", "bfloat16", "auto"),
    Variant("bfloat16, cache fp8", "bfloat16", "fp8"),
)


def make_llm(variant: Variant) -> LLM:
    """Return an engine of a variant."""
    return LLM(
        str(find_demo_model()),
        device="cpu",
        dtype=variant.dtype,
        kv_cache_dtype=variant.kv_cache_dtype,
        block_size=variant.block_size,
        num_gpu_blocks_override=32_768 // variant.block_size,
        max_num_batched_tokens=64,
    )


def perplexity(llm: LLM, texts: list[list[int]]) -> float:
    """Return the exponential of the mean negative log likelihood of the tokens behind the first."""
    outputs = llm.generate(texts, SamplingParams(max_tokens=1, prompt_logprobs=0))
    total, count = 0.0, 0
    for text, output in zip(texts, outputs, strict=True):
        assert output.prompt_logprobs is not None
        for token_id, entries in zip(text[FIRST:], output.prompt_logprobs[FIRST:], strict=True):
            assert entries is not None
            total, count = total - entries[token_id].logprob, count + 1
    return exp(total / count)


def greedy(llm: LLM, texts: list[list[int]]) -> list[list[int]]:
    """Return the tokens after the texts' beginnings."""
    params = SamplingParams(temperature=0, max_tokens=NUM_GREEDY, ignore_eos=True)
    outputs = llm.generate([text[:START] for text in texts], params)
    return [list(output.outputs[0].token_ids) for output in outputs]


def agreement(tokens: list[list[int]], expected: list[list[int]]) -> tuple[float, float]:
    """Return the share of tokens before the first that differs, and of texts without one."""
    same = [
        next((place for place, (a, b) in enumerate(zip(got, wanted, strict=True)) if a != b), NUM_GREEDY)
        for got, wanted in zip(tokens, expected, strict=True)
    ]
    return sum(same) / len(same) / NUM_GREEDY, sum(place == NUM_GREEDY for place in same) / len(same)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=48)
    parser.add_argument("--short", action="store_true", help="two texts")
    options = parser.parse_args()
    chance = Random(SEED)
    stories = [long_story(draw_cast(chance), chance) for _ in range(2 if options.short else options.texts)]
    expected: list[list[int]] = []
    for variant in VARIANTS:
        llm = make_llm(variant)
        tokenizer = llm.get_tokenizer()
        texts = [tokenizer.encode(story).ids[:CONTEXT] for story in stories]
        tokens = greedy(llm, texts)
        expected = expected or tokens
        share, whole = agreement(tokens, expected)
        pool = llm.engine.memory_bytes()["kv_pool"] / 32_768
        print(
            f"{variant.name}: {pool:,.0f} bytes a token, perplexity {perplexity(llm, texts):.4f}, "
            f"agrees {share:.1%}, whole {whole:.1%} of {sum(map(len, texts))} tokens in {len(texts)} texts",
            flush=True,
        )
        llm.engine.close()


if __name__ == "__main__":
    main()
