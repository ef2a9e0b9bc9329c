"""`vllm bench serve` against `pagestream serve` and `vllm serve` (CPU build) with one model, in turns.

    PYTHONPATH=tests python tests/benchmarks/vllm_serve.py --vllm /path/to/vllm [--rounds 2] [--dtype bfloat16]

The reference model of engine_throughput.py with a tokenizer of 8,192 byte-level tokens. Both servers run all the time
and share both cores; one is asked at a time. Each stream asks for 64 tokens after 128, again and again. How to make an
environment with the command: docs/benchmarks/vllm-bench.md.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from engine_throughput import SHAPE, make_model
from goals import print_goal
from support.processes.served import running_serve
from support.processes.waiting import wait_until
from vllm_cpu import instruction_sets

NAME = "reference"
STREAMS = {1: 8, 16: 64, 64: 192}
"""Concurrent streams, and requests of a run."""
COLUMNS = {
    "tokens/s": "output_throughput",
    "TTFT p50 ms": "median_ttft_ms",
    "TTFT p99 ms": "p99_ttft_ms",
    "ITL p50 ms": "median_itl_ms",
    "ITL p99 ms": "p99_itl_ms",
}
"""Names in the table, and in the file that the benchmark writes."""
LIMIT_S = 900.0
READY_LIMIT_S = 300.0
BFLOAT16 = ("avx512_bf16", "amx_bf16")
"""Instruction sets that multiply in bfloat16; without one it is emulated."""

Figures = Mapping[str, float]


def make_folder(folder: Path, dtype: str) -> Path:
    """Write the reference model with a byte-level tokenizer of its vocabulary, trained on random syllables."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    make_model(folder, dtype)
    rng = random.Random(0)
    syllables = [first + vowel + last for first in "bdfgklmnprstvz" for vowel in "aeiou" for last in "lmnrst"]
    lines = (" ".join("".join(rng.choices(syllables, k=rng.randint(1, 3))) for _ in range(20)) for _ in range(4000))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=SHAPE["vocab_size"],
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
    """Run `vllm serve` on both cores; yield its URL when it is ready."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    cores = sorted(os.sched_getaffinity(0))
    variables = {
        **os.environ,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": f"{cores[0]}-{cores[-1]}",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    command = [vllm, "serve", str(model), "--served-model-name", NAME, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--dtype", dtype, "--max-model-len", str(SHAPE["max_position_embeddings"]), "--max-num-seqs", "64"]
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


def measure(vllm: str, url: str, model: Path, streams: int, folder: Path) -> Figures:
    """Run the benchmark once; return what it wrote."""
    result = folder / "result.json"
    requests = STREAMS[streams]
    command = [
        *(vllm, "bench", "serve", "--base-url", url, "--backend", "openai", "--endpoint", "/v1/completions"),
        *("--model", NAME, "--tokenizer", str(model), "--dataset-name", "random", "--random-input-len", "128"),
        *("--random-output-len", "64", "--num-prompts", str(requests), "--max-concurrency", str(streams)),
        *("--ignore-eos", "--seed", "0", "--percentile-metrics", "ttft,itl", "--disable-tqdm"),
        *("--save-result", "--result-dir", str(folder), "--result-filename", result.name),
    ]
    variables = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    if done.returncode != 0:
        raise SystemExit(f"vllm bench serve has failed:\n{(done.stdout + done.stderr)[-4000:]}")
    figures: dict[str, Any] = json.loads(result.read_text())
    if figures["completed"] != requests:
        raise SystemExit(f"{requests - figures['completed']} of {requests} requests have failed at {url}")
    return {name: float(figures[column]) for name, column in COLUMNS.items()}


def compare(vllm: str, dtype: str, rounds: int) -> dict[int, dict[str, list[Figures]]]:
    """Ask both servers in turns, beginning with the other one in each round."""
    found: dict[int, dict[str, list[Figures]]] = {streams: {"pagestream": [], "vllm": []} for streams in STREAMS}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = make_folder(folder / "model", dtype)
        options = (str(model), "--served-model-name", NAME, "--dtype", dtype)
        with (
            running_serve(folder, *options) as served,
            running_vllm(vllm, model, dtype, folder / "vllm.log") as theirs,
        ):
            ours = f"http://127.0.0.1:{served.process('gateway-0').ports['http']}"
            urls = {"pagestream": ours, "vllm": theirs}
            for each in urls.values():
                measure(vllm, each, model, 1, folder)  # warm up
            for number in range(rounds):
                for streams in STREAMS:
                    for side in sorted(urls, reverse=bool(number % 2)):
                        found[streams][side].append(measure(vllm, urls[side], model, streams, folder))
    return found


def main() -> int:
    """Print the medians of both servers, and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", required=True, help="the vllm command of an environment of its own")
    parser.add_argument("--rounds", type=int, default=2)
    sets = instruction_sets()
    default = "bfloat16" if any(each in sets for each in BFLOAT16) else "float32"
    parser.add_argument("--dtype", default=default, help=f"of the weights (default here: {default})")
    options = parser.parse_args()
    found = compare(options.vllm, options.dtype, options.rounds)
    print(
        f"{options.dtype}; instruction sets: {sets}; {len(os.sched_getaffinity(0))} cores; medians of {options.rounds}"
    )
    print(f"| streams | server | {' | '.join(COLUMNS)} |")
    print("|---|---|" + "---|" * len(COLUMNS))
    for streams, sides in found.items():
        middle = {side: {name: median(run[name] for run in runs) for name in COLUMNS} for side, runs in sides.items()}
        for side, values in middle.items():
            print(f"| {streams} | {side} | {' | '.join(f'{values[name]:.1f}' for name in COLUMNS)} |")
        ratio = middle["pagestream"]["tokens/s"] / middle["vllm"]["tokens/s"]
        print_goal(f"served, {streams} streams, against vllm serve", ">= 1.0x", f"{ratio:.2f}x")
    return 0


if __name__ == "__main__":
    sys.exit(main())
