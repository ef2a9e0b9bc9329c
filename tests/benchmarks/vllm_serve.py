"""`vllm bench serve` against `pagestream serve` and `vllm serve` (CPU build) with one model, in turns.

    PYTHONPATH=tests python tests/benchmarks/vllm_serve.py --vllm /path/to/vllm [--loads 1 16 64] [--rounds 2]

The reference model of engine_throughput.py, its context raised to 4,096, with a tokenizer of 8,192 byte-level tokens;
in bfloat16 where the processor multiplies in it, else in float32. Both servers run all the time, with as many computing
threads as there are cores and `max_num_seqs` 256; one is asked at a time. Streams ask again and again:

    1, 16, 64, 1000    128 tokens in, 64 out (1000: 32 out), so many streams
    long, short        2,000 tokens in and 64 out, 16 streams; 32 in and 8 out, 64 streams
    structured         128 tokens in, 64 out of a JSON schema, 16 streams

A load's table and goals are printed when it has been measured. A run that takes longer than `--limit` is stopped, and
its load is left out. With `--json FILE` figures are kept, and loads that the file has are not measured again: a quiet
machine is needed for a few minutes at a time only. How to make an environment with the command:
docs/benchmarks/vllm-bench.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import socket
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from goals import print_goal
from itl_bound import make_model
from support.processes.served import running_serve
from support.processes.waiting import wait_until
from vllm_cpu import instruction_sets

NAME = "reference"
TOKENIZE_QUEUE = "PAGESTREAM_LIMITS__TOKENIZE_QUEUE"
"""A thousand requests at once are more than a gateway lets wait for its tokenizer by default."""
CONTEXT = 4096
MAX_NUM_SEQS = 256


@dataclass(frozen=True)
class Load:
    """What one run of the load generator asks for."""

    streams: int
    num_requests: int
    input_tokens: int = 128
    output_tokens: int = 64
    body: Mapping[str, Any] = field(default_factory=dict)
    """Members of each request beside the usual ones."""


ROW = {"type": "object", "properties": {"id": {"type": "integer"}}, "required": ["id"]}
SCHEMA = {"type": "array", "items": ROW, "minItems": 64}
"""Longer than any answer, so that none ends by itself."""
LOADS = {
    "1": Load(1, 8),
    "16": Load(16, 64),
    "64": Load(64, 192),
    "1000": Load(1000, 1000, output_tokens=32),
    "long": Load(16, 32, input_tokens=2000),
    "short": Load(64, 512, input_tokens=32, output_tokens=8),
    "structured": Load(
        16,
        64,
        body={"response_format": {"type": "json_schema", "json_schema": {"name": "rows", "schema": SCHEMA}}},
    ),
}
COLUMNS = {
    "tokens/s": "output_throughput",
    "TTFT p50 ms": "median_ttft_ms",
    "TTFT p99 ms": "p99_ttft_ms",
    "ITL p50 ms": "median_itl_ms",
    "ITL p99 ms": "p99_itl_ms",
}
"""Names in the table, and in the file that the benchmark writes."""
MOST = {"TTFT p50 ms": 1.0, "TTFT p99 ms": 1.0, "ITL p50 ms": 1.0, "ITL p99 ms": 1.0}
"""Ratios to vLLM's that are wanted."""
MOST_ITL_P99 = {"64": 0.5}
LIMIT_S = 600.0
READY_LIMIT_S = 600.0
BFLOAT16 = ("avx512_bf16", "amx_bf16")
"""Instruction sets that multiply in bfloat16; without one it is emulated."""

Figures = Mapping[str, float]
Sides = dict[str, list[Figures]]


def make_folder(folder: Path, dtype: str) -> Path:
    """Write the reference model with a byte-level tokenizer of its vocabulary, trained on random syllables."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    make_model(folder, dtype, CONTEXT)
    rng = random.Random(0)
    syllables = [first + vowel + last for first in "bdfgklmnprstvz" for vowel in "aeiou" for last in "lmnrst"]
    lines = (" ".join("".join(rng.choices(syllables, k=rng.randint(1, 3))) for _ in range(20)) for _ in range(4000))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=8192,
        special_tokens=["<|pad|>", "<|bos|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(lines, trainer=trainer)
    made = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, bos_token="<|bos|>", eos_token="<|end|>", pad_token="<|pad|>"
    )
    made.save_pretrained(folder)
    return folder


@contextmanager
def running_vllm(vllm: str, model: Path, dtype: str, log_path: Path) -> Iterator[str]:
    """Run `vllm serve` with a thread on each core; yield its URL when it is ready."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    cores = sorted(os.sched_getaffinity(0))
    variables = {
        **os.environ,
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": f"{cores[0]}-{cores[-1]}",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    command = [vllm, "serve", str(model), "--served-model-name", NAME, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--dtype", dtype, "--max-model-len", str(CONTEXT), "--max-num-seqs", str(MAX_NUM_SEQS)]
    with log_path.open("wb") as log, subprocess.Popen(command, env=variables, stdout=log, stderr=log) as process:

        def is_ready() -> bool:
            if process.poll() is not None:
                raise SystemExit(f"vllm serve has ended:\n{log_path.read_text()[-4000:]}")
            try:
                with urllib.request.urlopen(f"{url}/health", timeout=2) as answer:  # noqa: S310  loopback
                    return bool(answer.status == 200)
            except (urllib.error.URLError, OSError):
                return False

        try:
            wait_until(is_ready, "vllm serve is ready", READY_LIMIT_S)
            yield url
        finally:
            process.terminate()
            process.wait(60)


def measure(command: str, url: str, model: Path, load: Load, *, limit_s: float = LIMIT_S) -> Figures:
    """Run the benchmark once; return what it wrote.

    Raises:
        TimeoutExpired: it was stopped after `limit_s`.
    """
    result = model.parent / "result.json"
    arguments = [
        *(command, "bench", "serve", "--base-url", url, "--backend", "openai", "--endpoint", "/v1/completions"),
        *("--model", NAME, "--tokenizer", str(model), "--dataset-name", "random"),
        *("--random-input-len", str(load.input_tokens), "--random-output-len", str(load.output_tokens)),
        *("--num-prompts", str(load.num_requests), "--max-concurrency", str(load.streams)),
        *("--ignore-eos", "--seed", "0", "--percentile-metrics", "ttft,itl", "--disable-tqdm"),
        *("--save-result", "--result-dir", str(result.parent), "--result-filename", result.name),
    ]
    if load.body:
        arguments += ["--extra-body", json.dumps(load.body)]
    variables = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(arguments, env=variables, capture_output=True, text=True, timeout=limit_s, check=False)
    if done.returncode != 0:
        raise SystemExit(f"vllm bench serve has failed:\n{(done.stdout + done.stderr)[-4000:]}")
    figures: dict[str, Any] = json.loads(result.read_text())
    if figures["completed"] != load.num_requests:
        failed = load.num_requests - figures["completed"]
        raise SystemExit(f"{failed} of {load.num_requests} requests have failed at {url}: {done.stdout[-2000:]}")
    return {name: float(figures[column]) for name, column in COLUMNS.items()}


def compare(options: argparse.Namespace) -> Iterator[tuple[str, Sides]]:
    """Ask both servers in turns, beginning with the other one in each round; yield a load's figures by server."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = make_folder(folder / "model", options.dtype)
        os.environ.setdefault(TOKENIZE_QUEUE, "2048")
        ours = ("--served-model-name", NAME, "--dtype", options.dtype, "--max-num-seqs", str(MAX_NUM_SEQS))
        with (
            running_serve(folder, str(model), *ours, *options.option) as served,
            running_vllm(options.vllm, model, options.dtype, folder / "vllm.log") as theirs,
        ):
            urls = {"pagestream": f"http://127.0.0.1:{served.process('gateway-0').ports['http']}", "vllm": theirs}
            for each in urls.values():
                measure(options.vllm, each, model, LOADS["1"])  # warm up
            for load in options.loads:
                found: Sides = {side: [] for side in urls}
                try:
                    for number in range(options.rounds):
                        for side in sorted(urls, reverse=bool(number % 2)):
                            figures = measure(options.vllm, urls[side], model, LOADS[load], limit_s=options.limit)
                            found[side].append(figures)
                except subprocess.TimeoutExpired:
                    print(f"{load} is left out: a run took longer than {options.limit:.0f} s", flush=True)
                    continue
                yield load, found


def machine(vllm: str) -> str:
    """Return what figures depend on: processor, instruction sets, cores, versions, other load."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    kinds = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    asked = subprocess.run([vllm, "--version"], capture_output=True, text=True, timeout=300, check=False)
    return (
        f"{kinds.get('model name', platform.machine())}, family {kinds.get('cpu family', '?')} model "
        f"{kinds.get('model', '?')}; {instruction_sets()}; {len(os.sched_getaffinity(0))} cores; load "
        f"{os.getloadavg()[0]:.1f}; pagestream {version('pagestream')}, vLLM {asked.stdout.split()[-1]}, "
        f"torch {version('torch')}"
    )


def print_load(name: str, sides: Sides) -> None:
    """Print the medians of a load, and their ratios beside the goals."""
    load = LOADS[name]
    what = f"{load.streams} streams, {load.input_tokens} in, {load.output_tokens} out"
    if load.body:
        what += ", structured"
    middle = {side: {column: median(run[column] for run in runs) for column in COLUMNS} for side, runs in sides.items()}
    for side, values in middle.items():
        print(f"| {what} | {side} | {' | '.join(f'{values[column]:.1f}' for column in COLUMNS)} |", flush=True)
    ratios = {column: middle["pagestream"][column] / max(middle["vllm"][column], 1e-9) for column in COLUMNS}
    least = 1.05 if "amx_bf16" in instruction_sets() else 1.2
    for column, ratio in ratios.items():
        most = MOST_ITL_P99.get(name, MOST["ITL p99 ms"]) if column == "ITL p99 ms" else MOST.get(column)
        wanted = f">= {least}x" if most is None else f"<= {most}x"
        print_goal(f"{what}, {column} against vllm serve", wanted, f"{ratio:.2f}x")


def main() -> int:
    """Print the medians of both servers, and their ratios beside the goals."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", required=True, help="the vllm command of an environment of its own")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS), metavar="LOAD")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help=f"seconds of one run (default: {LIMIT_S:.0f})")
    parser.add_argument("--json", type=Path, help="keep figures in this file; loads that it has are not measured")
    parser.add_argument("--option", action="append", default=[], help="--option=--flag=value, of pagestream serve")
    sets = instruction_sets()
    default = "bfloat16" if any(each in sets for each in BFLOAT16) else "float32"
    parser.add_argument("--dtype", default=default, help=f"of the weights (default here: {default})")
    options = parser.parse_args()
    kept: dict[str, Sides] = json.loads(options.json.read_text()) if options.json and options.json.exists() else {}
    print(f"{machine(options.vllm)}; {options.dtype}; medians of {options.rounds}; {' '.join(options.option)}")
    print(f"| load | server | {' | '.join(COLUMNS)} |")
    print("|---|---|" + "---|" * len(COLUMNS), flush=True)
    for name in options.loads:
        if name in kept:
            print_load(name, kept[name])
    options.loads = [name for name in options.loads if name not in kept]
    if options.loads:
        for name, sides in compare(options):
            print_load(name, sides)
            if options.json:
                kept[name] = sides
                options.json.write_text(json.dumps(kept, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
