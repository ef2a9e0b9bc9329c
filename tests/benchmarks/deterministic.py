"""What bit-identical logits cost: `LLM(deterministic=True)` against `deterministic=False`, in turn, in one process.

Four workloads, greedy, end-of-sequence ignored: the reference workload (see `engine_throughput`) and one of its streams
alone; 32 streams of the demo model's questions, and one alone. Each round runs every side once, and a side's best run
counts: what else this machine does can only slow a run down. The cost is how much longer the deterministic side takes.

    python tests/benchmarks/deterministic.py [--short] [--json FILE] [--repeats 5] [--dtype bfloat16]
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from pathlib import Path

import torch
from engine_throughput import DTYPES, make_model, make_prompts, timed
from pagestream_engine import LLM, SamplingParams

DEMO = Path(__file__).parents[2] / "deploy" / "demo-model" / "model"
SIDES = {"default": False, "deterministic": True}
GOAL_PERCENT = 10.0
Run = Callable[[], int]


@dataclass(frozen=True)
class Workload:
    """Requests to run together on one model."""

    name: str
    folder: Path
    prompts: list[list[int]]
    output_tokens: int
    rounds: int
    """Runs of each side for one of `--repeats`: short runs need more of them, since any of them may be disturbed."""


@dataclass(frozen=True)
class Result:
    """One workload's rates, in output tokens a second."""

    workload: str
    default_tokens_per_s: float
    deterministic_tokens_per_s: float
    cost_percent: float
    num_requests: int
    output_tokens: int


def demo_prompts(count: int) -> list[list[int]]:
    """The demo model's held-out questions in turn."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    questions = json.loads((DEMO / "questions.json").read_text())["held_out"]
    texts = ["\n".join(message["content"] for message in question["messages"]) for question in questions]
    return [tokenizer.encode(text, add_special_tokens=False).ids for text in islice(cycle(texts), count)]


def workloads(reference: Path, *, short: bool) -> list[Workload]:
    """All four; a short one has a quarter of the requests and tokens."""
    share = 4 if short else 1
    many, one = make_prompts(64 // share), make_prompts(1)
    return [
        Workload("reference", reference, many, 64 // share, 1),
        Workload("reference, one stream", reference, one, 64 // share, 8),
        Workload("demo, 32 streams", DEMO, demo_prompts(32), 96 // share, 8),
        Workload("demo, one stream", DEMO, demo_prompts(1), 96 // share, 16),
    ]


def make_run(workload: Workload, *, deterministic: bool) -> Run:
    """`LLM.generate` over all requests at once, from an empty prefix cache."""
    llm = LLM(workload.folder, device="cpu", max_num_seqs=64, enable_prefix_caching=False, deterministic=deterministic)
    params = SamplingParams(temperature=0.0, max_tokens=workload.output_tokens, ignore_eos=True)

    def run() -> int:
        outputs = llm.generate(workload.prompts, params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    return run


def measure(workload: Workload, repeats: int) -> Result:
    """Runs both sides in turn, after one run each that does not count: it tries the row counts that occur."""
    runs = {side: make_run(workload, deterministic=deterministic) for side, deterministic in SIDES.items()}
    for run in runs.values():
        run()
    best = dict.fromkeys(runs, 0.0)
    for index in range(repeats * workload.rounds):
        order = list(runs) if index % 2 else list(reversed(runs))
        for side in order:
            best[side] = max(best[side], timed(runs[side]))
    return Result(
        workload=workload.name,
        default_tokens_per_s=round(best["default"], 1),
        deterministic_tokens_per_s=round(best["deterministic"], 1),
        cost_percent=round(100 * (best["default"] / best["deterministic"] - 1), 1),
        num_requests=len(workload.prompts),
        output_tokens=workload.output_tokens,
    )


def main() -> None:
    """Prints each result as it comes, and all as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--short", action="store_true", help="a quarter of the requests and tokens")
    parser.add_argument("--repeats", type=int, default=5, help="rounds over both sides")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bfloat16", help="of the reference workload")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of torch")
    parser.add_argument("--json", type=Path, help="file that the results are written to")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(options.threads)
    results = []
    with tempfile.TemporaryDirectory() as name:
        reference = make_model(Path(name) / "model", options.dtype)
        for workload in workloads(reference, short=options.short):
            result = measure(workload, options.repeats)
            results.append(result)
            print(
                f"{result.workload}: {result.default_tokens_per_s} tok/s by default, "
                f"{result.deterministic_tokens_per_s} deterministic: {result.cost_percent:+} % "
                f"(goal: at most {GOAL_PERCENT:g})",
                flush=True,
            )
    if options.json is not None:
        rows = {"dtype": options.dtype, "threads": options.threads, "results": [asdict(result) for result in results]}
        options.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
