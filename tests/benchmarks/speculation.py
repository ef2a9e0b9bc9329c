"""Speed with drafts against without, on the reference model (engine_throughput.py), in turns in one run.

Two texts: greedy output of random weights falls into a loop, so that nearly every draft holds; at temperature 1 it is
noise in which hardly two tokens stand twice, so that drafts can only cost time. A third lies between: noise that takes
up its own words, by a bias on 40 tokens. Tokens are compared where the engine is deterministic.

Drafts are n-grams; with `--draft-layers n` they are a draft model's: the target's own first n layers, with the output
of the layers above divided by 20 in the target, so that the two agree on most tokens.

A second engine without drafts is timed with the others: how far its speed is from the first one's is what the figures
can't tell. On a machine with other work time it by `--clock processor`, with OMP_NUM_THREADS=1: then all that a run
computes is on one thread, whose processor time counts.

    PYTHONPATH=tests python tests/benchmarks/speculation.py [--rounds 3] [--streams 1 8 64] [--output-tokens 128]

`--vllm PYTHON` times n-grams beside those of vLLM's CPU build in place of this, on the same model and texts.
"""

from __future__ import annotations

import argparse
import re
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from draft_model import first_layers
from engine_throughput import make_model, make_prompts
from goals import print_goal
from pagestream_engine import LLM, SamplingParams
from safetensors.torch import load_file, save_file
from speculation_vllm import compare

TEXTS: dict[str, dict[str, Any]] = {
    "loop": {"temperature": 0.0},
    "few words": {"temperature": 0.7, "logit_bias": dict.fromkeys(range(100, 140), 12.0)},
    "noise": {"temperature": 1.0},
}


CLOCKS = {"wall": time.perf_counter, "processor": time.thread_time}
UPPER_LAYERS = re.compile(r"model\.layers\.(\d+)\.(self_attn\.o_proj|mlp\.down_proj)\.weight")


def damp_above(model: Path, num_layers: int) -> None:
    """Divide what the layers from a number on add by 20."""
    path = model / "model.safetensors"
    weights = load_file(path)
    for name, weight in weights.items():
        found = UPPER_LAYERS.fullmatch(name)
        if found and int(found[1]) >= num_layers:
            weight.div_(20)
    save_file(weights, path, metadata={"format": "pt"})


def timed(
    llm: LLM, prompts: list[list[int]], params: list[SamplingParams], clock: Callable[[], float]
) -> tuple[float, list[list[int]]]:
    """Return seconds, and the tokens of each output."""
    started = clock()
    outputs = llm.generate(prompts, params)
    return clock() - started, [output.outputs[0].token_ids for output in outputs]


def main() -> None:
    """Print a row for each text and number of streams."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--max-num-seqs", type=int, default=64, help="rows of a step, drafts among them")
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--draft-layers", type=int, help="of a draft model, in place of n-grams")
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall")
    parser.add_argument("--texts", choices=list(TEXTS), nargs="+", default=list(TEXTS))
    parser.add_argument("--vllm", metavar="PYTHON", help="of an environment with vLLM: n-grams here and there")
    args = parser.parse_args()
    clock = CLOCKS[args.clock]
    texts = {name: TEXTS[name] for name in args.texts}
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder) / "model", args.dtype)
        if args.vllm is not None:
            work = {
                "prompts": make_prompts(max(args.streams)),
                "texts": texts,
                "output_tokens": args.output_tokens,
                "max_num_seqs": args.max_num_seqs,
            }
            compare(args.vllm, model, work, args.streams, args.rounds)
            return
        path = str(model)
        drafts: dict[str, Any] = {"speculative_method": "ngram"}
        if args.draft_layers is not None:
            damp_above(model, args.draft_layers)
            draft = first_layers(model, Path(folder) / "draft", args.draft_layers)
            drafts = {"speculative_model": str(draft)}
        options = {"max_num_seqs": args.max_num_seqs, "enable_prefix_caching": False}
        plain, again, drafting = LLM(path, **options), LLM(path, **options), LLM(path, **options, **drafts)
        print(f"deterministic: {plain.engine.is_deterministic}")
        print("| text | streams | drafts a token | accepted | speed, of without | without again |")
        print("|---|---|---|---|---|---|")
        for text, settings in texts.items():
            for streams in args.streams:
                prompts = make_prompts(streams)
                params = [
                    SamplingParams(max_tokens=args.output_tokens, ignore_eos=True, seed=seed, **settings)
                    for seed in range(streams)
                ]
                before, ratios, same = drafting.engine.stats(), [], []
                for _ in range(args.rounds):
                    without_s, expected = timed(plain, prompts, params, clock)
                    with_s, tokens = timed(drafting, prompts, params, clock)
                    again_s, _ = timed(again, prompts, params, clock)
                    ratios.append(without_s / with_s)
                    same.append(without_s / again_s)
                    if plain.engine.is_deterministic and tokens != expected:
                        raise SystemExit(f"{text}, {streams} streams: the tokens differ")
                after = drafting.engine.stats()
                drafted = after.num_draft_tokens - before.num_draft_tokens
                accepted = after.num_accepted_tokens - before.num_accepted_tokens
                num_tokens = args.rounds * streams * args.output_tokens
                share = accepted / drafted if drafted else 0.0
                ratio = median(ratios)
                cells = f"{drafted / num_tokens:.2f} | {share:.0%} | {ratio:.2f} | {median(same):.2f}"
                print(f"| {text} | {streams} | {cells} |", flush=True)
                if args.draft_layers is not None:
                    continue
                if text == "loop" and streams == 1:
                    print_goal("one stream that repeats itself, with drafts", ">= 1.8", f"{ratio:.2f}")
                if text == "noise":
                    print_goal(f"{streams} streams of noise, with drafts", ">= 0.98", f"{ratio:.2f}")


if __name__ == "__main__":
    main()
