"""Where a step's time goes on this machine's CPU, by operation, beside the time that the machine's limits allow.

    python tests/benchmarks/roofline.py [--threads 2] [--dtype bfloat16] [--rounds 3] [--short]

The reference workload's model (see `engine_throughput`): a prefill step of 2,048 tokens, a decode step of 64 sequences,
and one of a single sequence. An operation's limit is the larger of its bytes by the rate at which memory is read, and
its arithmetic by the rate of multiply-adds from registers, both measured before and after. "Share" is of the step,
"of the limit" how much of an operation's own time the limit would take: above 100 % its operands were in a cache.
Each table is of the quickest step of its kind, since other load only slows a step down. With one thread times are of
the processor.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from pathlib import Path

import torch
from engine_throughput import DTYPES, make_model, make_prompts
from machine_limits import MachineLimits, clock, measure_limits
from pagestream_engine import Engine, EngineConfig, SamplingParams
from pagestream_engine.config import EngineOptions
from pagestream_engine.runner import ModelRunner
from timed_operations import CountedOperators, TimedOperations, Work

ROWS = 64


@dataclass(frozen=True)
class Step:
    """One step's time, and that of its operations."""

    seconds: float
    query_lens: Sequence[int]
    """New tokens of each sequence."""
    operations: Mapping[str, Work]


KINDS: Mapping[str, Callable[[Sequence[int]], bool]] = {
    "prefill of 2,048 tokens": lambda query_lens: sum(query_lens) == 2048 and 1 not in query_lens,
    f"decode of {ROWS} sequences": lambda query_lens: query_lens == [1] * ROWS,
    "decode of one sequence": lambda query_lens: query_lens == [1],
}
"""By new tokens of each sequence. All but the first prefill step of the workload decode sequences, too."""


class Reference:
    """The reference model in an engine whose operations are timed."""

    def __init__(self, folder: Path, output_tokens: int) -> None:
        runners: list[ModelRunner] = []

        def make_runner(folder: Path, config: EngineConfig) -> ModelRunner:
            runners.append(ModelRunner(folder, config, torch.device("cpu")))
            return runners[0]

        options = EngineOptions(device="cpu", max_num_seqs=ROWS, enable_prefix_caching=False)
        self._engine = Engine(folder, EngineConfig.from_options(options), make_runner=make_runner)
        self._timed = TimedOperations(runners[0])
        self._params = SamplingParams(temperature=0.0, max_tokens=output_tokens, ignore_eos=True)
        self.backend = runners[0]._backend.name
        self.deterministic = runners[0].numerics.deterministic

    def run(self, num_requests: int) -> list[Step]:
        """Return all steps of some requests, from the first prefill on."""
        self._add(num_requests)
        steps = []
        while self._engine.has_unfinished_requests():
            self._timed.work.clear()
            start = clock()
            self._engine.step()
            seconds = clock() - start
            operations = {name: copy(work) for name, work in self._timed.work.items()}
            steps.append(Step(seconds, self._timed.query_lens, operations))
        return steps

    def operators_of_a_decode(self) -> int:
        """Return how many of torch's operators a decode step runs, all in all."""
        self._add(ROWS)
        counts: list[int] = []
        while self._engine.has_unfinished_requests():
            with CountedOperators() as counted:
                self._engine.step()
            counts.append(counted.count)
        return counts[-2]

    def _add(self, num_requests: int) -> None:
        for index, prompt in enumerate(make_prompts(num_requests)):
            self._engine.add_request(str(index), prompt, self._params)

    def quickest(self, rounds: int) -> dict[str, Step]:
        """Return the quickest step of each kind."""
        found: dict[str, Step] = {}
        for _ in range(rounds):
            for step in (*self.run(ROWS), *self.run(1)):
                for kind, is_of in KINDS.items():
                    if is_of(step.query_lens) and (kind not in found or step.seconds < found[kind].seconds):
                        found[kind] = step
        return found


def print_table(kind: str, step: Step, limits: MachineLimits, dtype: torch.dtype) -> None:
    """Print one step."""
    print(f"\n{kind}: {step.seconds * 1e3:.2f} ms\n")
    print("| operation | calls | ms | share | MB | GFLOP | GB/s | GFLOP/s | of the limit |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name, work in sorted(step.operations.items(), key=lambda item: -item[1].seconds):
        seconds, num_bytes, flops = work.seconds, work.num_bytes, work.flops
        line = f"| {name} | {work.calls} | {seconds * 1e3:.2f} | {seconds / step.seconds:.1%} | "
        if num_bytes:
            limit = limits.seconds(num_bytes, flops, dtype) / seconds
            line += f"{num_bytes / 1e6:.1f} | {flops / 1e9:.2f} | {num_bytes / seconds / 1e9:.1f} | "
            line += f"{flops / seconds / 1e9:.0f} | {limit:.0%} |"
        else:
            line += "| | | | |"
        print(line)
    rest = step.seconds - sum(work.seconds for work in step.operations.values())
    print(f"| the rest: host, embedding, calls | | {rest * 1e3:.2f} | {rest / step.seconds:.1%} | | | | | |")


def main() -> None:
    """Print the machine's limits and a table for each kind of step."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of torch")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bfloat16")
    parser.add_argument("--rounds", type=int, default=3, help="runs of the workload")
    parser.add_argument("--short", action="store_true", help="one round of few steps")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    dtype = DTYPES[options.dtype]
    limits = measure_limits(options.threads)
    with tempfile.TemporaryDirectory() as name:
        reference = Reference(make_model(Path(name) / "model", options.dtype), 8 if options.short else 32)
        steps = reference.quickest(1 if options.short else options.rounds)
        num_operators = reference.operators_of_a_decode()
    limits = limits.or_better(measure_limits(options.threads))
    print(f"{limits.processor} with {', '.join(limits.instruction_sets)}; {limits.threads} threads, {options.dtype}")
    print(
        f"memory {limits.bytes_per_s / 1e9:.1f} GB/s read in order, multiply-adds {limits.float32_flops / 1e9:.0f} "
        f"GFLOP/s in float32, {limits.bfloat16_flops / 1e9:.0f} in bfloat16"
    )
    mode = "deterministic" if reference.deterministic else "default mode"
    print(f"{reference.backend} kernels, {mode}, {num_operators} of torch's operators in a decode step")
    for kind, step in steps.items():
        print_table(kind, step, limits, dtype)


if __name__ == "__main__":
    main()
