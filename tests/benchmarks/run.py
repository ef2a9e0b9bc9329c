"""Runs the benchmarks that need no GPU, one after another; `make bench` calls it.

python tests/benchmarks/run.py [--short] [NAME ...]
"""

import argparse
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from goals import MARK

HERE = Path(__file__).resolve().parent

LIMIT_S = 1800


@dataclass(frozen=True)
class Benchmark:
    """A benchmark script in this folder."""

    name: str
    question: str
    has_short_form: bool
    script: str = ""
    """Name of the script, where it differs from the benchmark's."""
    arguments: Sequence[str] = ()


BENCHMARKS = (
    Benchmark("scheduler_step", "what does the scheduler cost a step?", has_short_form=False),
    Benchmark("host_cost", "what does a step cost the host beside its model?", has_short_form=True),
    Benchmark("paced_device", "how much of a device's limit is reached?", has_short_form=True),
    Benchmark("roofline", "where does a step's time go on a CPU, and how far are its limits?", has_short_form=True),
    Benchmark("attention_step", "what do options cost attention on a CPU?", has_short_form=False),
    Benchmark("sampler_step", "what do penalties, bias and log probabilities cost a step?", has_short_form=False),
    Benchmark("page_waste", "what do KV blocks waste on a trace?", has_short_form=True),
    Benchmark("block_map", "what does a picture of the KV blocks cost a step?", has_short_form=True),
    Benchmark("memory_sharing", "what does sharing of blocks save?", has_short_form=True),
    Benchmark("shared_prefix", "what could reading a common prefix once save?", has_short_form=False),
    Benchmark("host_tier", "what do blocks in host memory save?", has_short_form=True),
    Benchmark("streams_append", "what does a fenced append cost against plain XADDs?", has_short_form=False),
    Benchmark("streams_claim", "what does a claim cost, and how far is its order off?", has_short_form=False),
    Benchmark("placement", "what does placement keep of the prefix cache?", has_short_form=False),
    Benchmark("redis_commands", "what does a command to Redis take of a process?", has_short_form=False),
    Benchmark("streams_waits", "what do waits for the disk or a replica cost?", has_short_form=True),
    Benchmark("gateway_streams", "how many streams does one gateway carry?", has_short_form=False),
    Benchmark("metrics_sink", "what do the metrics of a thousand pods cost an operator?", has_short_form=True),
    Benchmark("full_path", "what do gateway, Redis and the worker cost against the engine alone?", has_short_form=True),
    Benchmark(
        "full_path_gpu",
        "what do they cost beside a model that takes none of their cores?",
        has_short_form=True,
        script="full_path",
        arguments=("--step-ms", "30"),
    ),
    Benchmark(
        "full_path_first_token",
        "what do they add to a first token, requests coming one by one?",
        has_short_form=True,
        script="full_path",
        arguments=("--step-ms", "30", "--rate", "15", "--repeats", "7"),
    ),
    Benchmark(
        "bare_path_first_token",
        "what do the same hops add that do nothing else?",
        has_short_form=False,
        script="bare_path",
        arguments=("--rate", "15"),
    ),
    Benchmark("bare_path", "and for a burst of 64?", has_short_form=False),
    Benchmark("path_cost", "what does a token cost in each stage of its path?", has_short_form=True),
    Benchmark("vllm_bench", "does vLLM's load generator run without an error?", has_short_form=False),
    Benchmark("telemetry", "what do metrics, spans and scrapes cost?", has_short_form=True),
    Benchmark("deterministic", "what do bit-identical logits cost?", has_short_form=True),
    Benchmark("exact_linears", "what do linears with one order of additions cost?", has_short_form=True),
    Benchmark("engine_throughput", "how fast is LLM.generate against transformers?", has_short_form=True),
    Benchmark("prefill_spread", "what do prompts spread over steps cost and gain?", has_short_form=True),
    Benchmark("itl_bound", "how long do streams wait while a long prompt arrives?", has_short_form=True),
    Benchmark("rate_sweep", "what rate is sustained at equal latency, against transformers?", has_short_form=True),
)


def run(benchmark: Benchmark, goals: list[str], *, short: bool) -> int:
    """Run one benchmark in its own process; return its exit status and append its goals to `goals`."""
    print(f"== {benchmark.name}: {benchmark.question}", flush=True)
    command = [sys.executable, str(HERE / f"{benchmark.script or benchmark.name}.py"), *benchmark.arguments]
    if short and benchmark.has_short_form:
        command.append("--short")
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        limit = threading.Timer(LIMIT_S, process.kill)
        limit.start()
        for line in process.stdout or ():
            print(line, end="", flush=True)
            if line.startswith(MARK):
                goals.append(f"| {benchmark.name}{line.removeprefix('goal').rstrip()}")
        status = process.wait()
        limit.cancel()
    return status


def main() -> int:
    """Run the named benchmarks, or all. Returns 1 if one failed."""
    names = [benchmark.name for benchmark in BENCHMARKS]
    parser = argparse.ArgumentParser(description="Run the benchmarks.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(names)} (default: all)")
    parser.add_argument("--short", action="store_true", help="smaller workloads, whose figures mean nothing")
    options = parser.parse_args()
    unknown = set(options.names) - set(names)
    if unknown:
        parser.error(f"{', '.join(sorted(unknown))}: expected some of {', '.join(names)}")
    chosen = [benchmark for benchmark in BENCHMARKS if not options.names or benchmark.name in options.names]
    goals: list[str] = []
    failed = [benchmark.name for benchmark in chosen if run(benchmark, goals, short=options.short)]
    if goals:
        print("\n".join(["", "| benchmark | what | wanted | measured |", "|---|---|---|---|", *goals]))
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
