"""`vllm bench serve` against `pagestream serve` with the demo model: both of its kinds of requests, without an error.

    VLLM_COMMAND=/path/to/vllm PYTHONPATH=tests python tests/benchmarks/vllm_bench.py [--requests 200]

Printed: a table of what vLLM's benchmark measured. The exit status is 1 where a request failed. How to make an
environment with the command: docs/benchmarks/vllm-bench.md.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from goals import print_goal
from support.processes.served import running_serve
from support.processes.stack import DEMO_MODEL

VARIABLE = "VLLM_COMMAND"
LIMIT_S = 900.0
KINDS = (("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions"))
COLUMNS = {
    "tokens/s": "output_throughput",
    "TTFT p50 ms": "median_ttft_ms",
    "TTFT p99 ms": "p99_ttft_ms",
    "TPOT p50 ms": "median_tpot_ms",
    "ITL p99 ms": "p99_itl_ms",
    "E2E p50 ms": "median_e2el_ms",
}
"""Names in the table, and in the file that vLLM writes."""


def arguments(kind: str, endpoint: str, options: argparse.Namespace) -> list[str]:
    """Return the arguments of `vllm bench serve`, without the server's address and the place of its result."""
    return [
        *("--backend", kind, "--endpoint", endpoint, "--model", "demo", "--tokenizer", str(DEMO_MODEL)),
        *("--dataset-name", "random", "--random-input-len", "64", "--random-output-len", "32"),
        *("--num-prompts", str(options.requests), "--max-concurrency", str(options.concurrency)),
        *("--ignore-eos", "--seed", "0", "--percentile-metrics", "ttft,tpot,itl,e2el", "--disable-tqdm"),
    ]


def measure(command: Sequence[str], folder: Path) -> Mapping[str, Any]:
    """Run the benchmark; return what it wrote."""
    result = folder / "result.json"
    saved = ["--save-result", "--result-dir", str(folder), "--result-filename", result.name]
    done = subprocess.run([*command, *saved], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    if done.returncode != 0:
        raise SystemExit(f"vllm bench serve has failed:\n{(done.stdout + done.stderr)[-4000:]}")
    figures: Mapping[str, Any] = json.loads(result.read_text())
    return figures


def main() -> int:
    """Measure both kinds of requests, and print them."""
    parser = argparse.ArgumentParser(description="vllm bench serve against pagestream serve")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--concurrency", type=int, default=16)
    options = parser.parse_args()
    vllm = os.environ.get(VARIABLE)
    if not vllm:
        print(f"skipped: {VARIABLE} does not name a vllm command")
        return 0
    failed = 0
    print(f"| endpoint | completed | failed | {' | '.join(COLUMNS)} |")
    print("|---|---|---|" + "---|" * len(COLUMNS))
    with tempfile.TemporaryDirectory() as name, running_serve(Path(name)) as served:
        url = f"http://127.0.0.1:{served.process('gateway-0').ports['http']}"
        for kind, endpoint in KINDS:
            command = [vllm, "bench", "serve", "--base-url", url, *arguments(kind, endpoint, options)]
            figures = measure(command, Path(name))
            lost = options.requests - figures["completed"]
            failed += lost
            cells = [f"{figures[column]:.1f}" for column in COLUMNS.values()]
            print(f"| `{endpoint}` | {figures['completed']} | {lost} | {' | '.join(cells)} |", flush=True)
    print_goal("requests of vllm bench serve that fail", "0", str(failed))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
