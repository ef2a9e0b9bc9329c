"""What bit-identical logits cost: `LLM(deterministic=True)` against `deterministic=False`, in turn, in one process.

Four workloads, greedy, end-of-sequence ignored: the reference workload (see `engine_throughput`) and one of its streams
alone; 32 streams of the demo model's questions, and one alone. Each round runs every side once, in the same steps. A
side's time is the sum over the steps of the shortest time of each, since other load on the machine only slows a step
down; with one thread it is of the processor. Both sides use one engine and switch its linears' methods, which is the
only difference between the modes. The cost is how much longer the deterministic side takes.

    python tests/benchmarks/deterministic.py [--short] [--json FILE] [--repeats 5] [--dtype bfloat16]
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from itertools import cycle, islice
from pathlib import Path

import torch
from engine_throughput import DTYPES, make_model, make_prompts
from goals import print_goal
from pagestream_engine import Engine, EngineConfig, SamplingParams
from pagestream_engine.config import EngineOptions
from pagestream_engine.runner import ModelRunner

DEMO = Path(__file__).parents[2] / "deploy" / "demo-model" / "model"
SIDES = {"default": False, "deterministic": True}
GOAL_PERCENT = 10.0
Run = Callable[[], list[float]]


@dataclass(frozen=True)
class Workload:
    """Requests to run together on one model."""

    name: str
    folder: Path
    prompts: list[list[int]]
    output_tokens: int
    rounds: int
    """Runs of each side per `--repeats`: short runs need more of them, since any may be disturbed."""


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
    """Return `count` prompts: the demo model's held-out questions in turn."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    questions = json.loads((DEMO / "questions.json").read_text())["held_out"]
    texts = ["\n".join(message["content"] for message in question["messages"]) for question in questions]
    return [tokenizer.encode(text, add_special_tokens=False).ids for text in islice(cycle(texts), count)]


def workloads(reference: Path, *, short: bool) -> list[Workload]:
    """Return all four workloads; short ones have a quarter of the requests and tokens."""
    share = 4 if short else 1
    many, one = make_prompts(64 // share), make_prompts(1)
    return [
        Workload("reference", reference, many, 64 // share, 1),
        Workload("reference, one stream", reference, one, 64 // share, 4),
        Workload("demo, 32 streams", DEMO, demo_prompts(32), 64 // share, 4),
        Workload("demo, one stream", DEMO, demo_prompts(1), 64 // share, 8),
    ]


def make_runs(workload: Workload) -> dict[str, Run]:
    """Return a function for each side that runs all requests uncached and returns the seconds of each step."""
    runners: list[ModelRunner] = []

    def make_runner(folder: Path, config: EngineConfig) -> ModelRunner:
        runners.append(ModelRunner(folder, config, torch.device("cpu")))
        return runners[-1]

    def config(deterministic: bool) -> EngineConfig:
        options = EngineOptions(device="cpu", max_num_seqs=64, enable_prefix_caching=False, deterministic=deterministic)
        return EngineConfig.from_options(options)

    engine = Engine(workload.folder, config(True), make_runner=make_runner)
    make_runner(workload.folder, config(False))
    params = SamplingParams(temperature=0.0, max_tokens=workload.output_tokens, ignore_eos=True)
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    linears = runners[0]._model.linears()
    exact, default = ([linear.method for linear in runner._model.linears()] for runner in runners)

    def run(deterministic: bool) -> list[float]:
        for linear, method in zip(linears, exact if deterministic else default, strict=True):
            linear.method = method
        for index, prompt in enumerate(workload.prompts):
            engine.add_request(str(index), prompt, params)
        seconds = []
        while engine.has_unfinished_requests():
            start = clock()
            engine.step()
            seconds.append(clock() - start)
        return seconds

    return {side: partial(run, deterministic) for side, deterministic in SIDES.items()}


def measure(workload: Workload, repeats: int) -> Result:
    """Run both sides in turn, after an uncounted run of each."""
    runs = make_runs(workload)
    for run in runs.values():
        run()
    shortest: dict[str, list[float]] = {}
    for index in range(repeats * workload.rounds):
        order = list(runs) if index % 2 else list(reversed(runs))
        for side in order:
            steps = runs[side]()
            shortest[side] = list(map(min, shortest.get(side, steps), steps))
    seconds = {side: sum(steps) for side, steps in shortest.items()}
    tokens = len(workload.prompts) * workload.output_tokens
    return Result(
        workload=workload.name,
        default_tokens_per_s=round(tokens / seconds["default"], 1),
        deterministic_tokens_per_s=round(tokens / seconds["deterministic"], 1),
        cost_percent=round(100 * (seconds["deterministic"] / seconds["default"] - 1), 1),
        num_requests=len(workload.prompts),
        output_tokens=workload.output_tokens,
    )


def main() -> None:
    """Print each result as it comes, and all as JSON."""
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
            wanted = f"<= {GOAL_PERCENT:g} %"
            print_goal(f"deterministic mode, {result.workload}", wanted, f"{result.cost_percent:+} %")
    if options.json is not None:
        rows = {"dtype": options.dtype, "threads": options.threads, "results": [asdict(result) for result in results]}
        options.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
