"""Throughput of `LLM.generate` against `transformers` with static batches, both in one run on one random model.

The reference workload: a Llama of 88 M parameters with random weights, 64 requests of 32 to 255 prompt tokens (uniform,
seed 0), 64 output tokens each, greedy, end-of-sequence ignored. The peer runs at every batch size of `--batch-sizes`
and its best one counts. Both sides are repeated in turn, and each side's best run counts, since other load only slows a
run down. `--short` takes a quarter of the requests and output tokens, to test in a minute that the benchmark works; its
ratio means nothing.

    python tests/benchmarks/engine_throughput.py [--short] [--json FILE] [--repeats 2] [--batch-sizes 16 32 64]
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
SHAPE = {
    "vocab_size": 8192,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
PROMPT_TOKENS = (32, 255)


@dataclass(frozen=True)
class Result:
    """Output tokens a second, and the machine."""

    pagestream_tokens_per_s: float
    transformers_tokens_per_s: float
    transformers_batch_size: int
    ratio: float
    transformers_by_batch_size: dict[int, float]
    num_requests: int
    output_tokens: int
    dtype: str
    torch_threads: int
    torch_version: str


def make_model(folder: Path, dtype: str) -> Path:
    """Write the model: configuration and random weights, no tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    LlamaForCausalLM._from_config(LlamaConfig(**SHAPE), dtype=DTYPES[dtype]).save_pretrained(folder)
    return folder


def make_prompts(count: int) -> list[list[int]]:
    """Return prompts of uniform length and tokens; the first n are the same for every count."""
    generator = random.Random(0)
    return [
        [generator.randrange(3, SHAPE["vocab_size"]) for _ in range(generator.randint(*PROMPT_TOKENS))]
        for _ in range(count)
    ]


def timed(run: Callable[[], int]) -> float:
    """Return the tokens a second of a run, which returns its number of tokens."""
    gc.collect()
    start = time.perf_counter()
    count = run()
    return count / (time.perf_counter() - start)


def pagestream_run(folder: Path, prompts: list[list[int]], output_tokens: int) -> Callable[[], int]:
    """Run `LLM.generate` over all requests at once, from an empty prefix cache: all prompts differ."""
    from pagestream_engine import LLM, SamplingParams

    llm = LLM(str(folder), max_num_seqs=64, enable_prefix_caching=False)
    params = SamplingParams(temperature=0.0, max_tokens=output_tokens, ignore_eos=True)

    def run() -> int:
        outputs = llm.generate(prompts, params)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    return run


def generate_static(model: Any, prompts: Sequence[list[int]], num_tokens: int) -> torch.Tensor:
    """Run `generate` of `transformers` over one left-padded batch. Return its (prompts, num_tokens) new tokens."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    output: torch.Tensor = model.generate(
        input_ids=ids,
        attention_mask=mask,
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        do_sample=False,
        pad_token_id=0,
    )
    return output[:, width:]


def transformers_runs(
    folder: Path, prompts: list[list[int]], output_tokens: int, dtype: str, batch_sizes: list[int]
) -> dict[int, Callable[[], int]]:
    """Run `generate` over left-padded batches in the order of the requests, once for each batch size."""
    from transformers import LlamaForCausalLM

    model: Any = LlamaForCausalLM.from_pretrained(folder, dtype=DTYPES[dtype]).eval()
    model.generation_config.eos_token_id = None

    def run(batch_size: int) -> int:
        batches = [prompts[first : first + batch_size] for first in range(0, len(prompts), batch_size)]
        return sum(generate_static(model, batch, output_tokens).numel() for batch in batches)

    return {size: (lambda size=size: run(size)) for size in batch_sizes}


def measure(options: argparse.Namespace) -> Result:
    """Run both sides in turn."""
    num_requests, output_tokens = (16, 16) if options.short else (64, 64)
    batch_sizes = [size for size in options.batch_sizes if size <= num_requests] or [num_requests]
    prompts = make_prompts(num_requests)
    with tempfile.TemporaryDirectory() as name:
        folder = make_model(Path(name) / "model", options.dtype)
        ours = pagestream_run(folder, prompts, output_tokens)
        theirs = transformers_runs(folder, prompts, output_tokens, options.dtype, batch_sizes)
        ours()
        our_best, their_best = 0.0, dict.fromkeys(theirs, 0.0)
        for _ in range(options.repeats):
            our_best = max(our_best, timed(ours))
            for size, run in theirs.items():
                their_best[size] = max(their_best[size], timed(run))
            our_best = max(our_best, timed(ours))
    best_size = max(their_best, key=lambda size: their_best[size])
    return Result(
        pagestream_tokens_per_s=round(our_best, 1),
        transformers_tokens_per_s=round(their_best[best_size], 1),
        transformers_batch_size=best_size,
        ratio=round(our_best / their_best[best_size], 2),
        transformers_by_batch_size={size: round(rate, 1) for size, rate in their_best.items()},
        num_requests=num_requests,
        output_tokens=output_tokens,
        dtype=options.dtype,
        torch_threads=torch.get_num_threads(),
        torch_version=torch.__version__,
    )


def main() -> None:
    """Print the result as JSON, and the ratio."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--short", action="store_true", help="a quarter of the requests and tokens")
    parser.add_argument("--repeats", type=int, default=2, help="rounds over both sides")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[8, 16, 32, 64], help="that the peer is tried at")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bfloat16")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of torch, for both sides")
    parser.add_argument("--json", type=Path, help="file that the result is written to")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    result = measure(options)
    text = json.dumps(asdict(result), indent=2)
    print(text)
    print(
        f"pagestream {result.pagestream_tokens_per_s} tok/s, transformers {result.transformers_tokens_per_s} tok/s "
        f"(batch {result.transformers_batch_size}): {result.ratio}x"
    )
    if options.json is not None:
        options.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
