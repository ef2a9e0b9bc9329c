"""Weights of 8 bits beside those of 16 and 32: memory and speed of the reference model, quality of the demo model.

    PYTHONPATH=tests:deploy/demo-model python tests/benchmarks/quantisation.py [speed | quality] [--short]

Speed: the reference model of `engine_throughput` in bfloat16, plain and with quantization int8, deterministic, one
thread. Engines generate in turns; a time is of the processor, the shortest of the turns. Quality: as `kv_cache_dtype`.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from random import Random

import kv_cache_dtype
import torch
from engine_throughput import SHAPE, make_model
from pagestream_cli.serve.model import find_demo_model
from pagestream_engine import LLM, SamplingParams
from stories import draw_cast, long_story

STREAMS = {1: 48, 64: 16}
"""Streams -> output tokens of each."""
PROMPT_TOKENS = 32
TURNS = 4
QUALITIES = (("float32", None), ("float32", "int8"), ("bfloat16", None), ("bfloat16", "int8"))
NUM_TEXTS = 24


def speed(turns: int) -> None:
    """Print memory and speed of the reference model, plain and quantised."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = make_model(Path(name) / "model", "bfloat16")
        engines = [
            LLM(
                str(folder),
                device="cpu",
                deterministic=True,
                quantization=quantization,
                num_gpu_blocks_override=512,
                enable_prefix_caching=False,
            )
            for quantization in (None, "int8")
        ]
    plain, quantised = (engine.engine.memory_bytes()["model"] / 2**20 for engine in engines)
    print(f"weights: bfloat16 {plain:.0f} MiB, int8 {quantised:.0f} MiB, ratio {quantised / plain:.2f}")
    for streams, num_tokens in STREAMS.items():
        seconds = [float("inf")] * len(engines)
        for turn in range(turns):
            sides = range(len(engines))
            for side in sides if turn % 2 else reversed(sides):
                seconds[side] = min(seconds[side], _decode_s(engines[side], streams, num_tokens))
        rates = [streams * num_tokens / each for each in seconds]
        ratio = rates[1] / rates[0]
        print(
            f"{streams} streams: {rates[0]:.0f} tokens/s in bfloat16, {rates[1]:.0f} in int8, ratio {ratio:.2f}",
            flush=True,
        )
    for engine in engines:
        engine.engine.close()


def _decode_s(llm: LLM, streams: int, num_tokens: int) -> float:
    """Seconds of the processor for tokens after the first of so many streams, prompts included in neither side's."""
    chance = Random(0)
    prompts = [
        [chance.randrange(3, int(str(SHAPE["vocab_size"]))) for _ in range(PROMPT_TOKENS)] for _ in range(streams)
    ]

    def generate(count: int) -> float:
        begin = time.thread_time()
        llm.generate(prompts, SamplingParams(temperature=0, max_tokens=count, ignore_eos=True))
        return time.thread_time() - begin

    return (generate(num_tokens + 1) - generate(1)) or float("inf")


def quality(num_texts: int) -> None:
    """Print perplexity and agreement of the demo model's greedy tokens with those in float32."""
    chance = Random(kv_cache_dtype.SEED)
    stories = [long_story(draw_cast(chance), chance) for _ in range(num_texts)]
    expected: list[list[int]] = []
    for dtype, quantization in QUALITIES:
        llm = LLM(
            str(find_demo_model()), device="cpu", dtype=dtype, quantization=quantization, num_gpu_blocks_override=2048
        )
        tokenizer = llm.get_tokenizer()
        texts = [tokenizer.encode(story).ids[: kv_cache_dtype.CONTEXT] for story in stories]
        tokens = kv_cache_dtype.greedy(llm, texts)
        expected = expected or tokens
        share, whole = kv_cache_dtype.agreement(tokens, expected)
        size = llm.engine.memory_bytes()["model"] / 2**20
        perplexity = kv_cache_dtype.perplexity(llm, texts)
        print(
            f"{dtype}, {quantization or 'plain'}: {size:.2f} MiB, perplexity {perplexity:.4f}, "
            f"agrees {share:.1%}, whole {whole:.1%} of {len(texts)} texts",
            flush=True,
        )
        llm.engine.close()


def main() -> None:
    """Run what was asked for, by default both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("speed", "quality"))
    parser.add_argument("--short", action="store_true", help="one turn, two texts")
    options = parser.parse_args()
    if options.what != "quality":
        speed(1 if options.short else TURNS)
    if options.what != "speed":
        quality(2 if options.short else NUM_TEXTS)


if __name__ == "__main__":
    main()
