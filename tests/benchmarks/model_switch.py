"""The seconds until a request for another model than the engine has gets its first token, and what they are spent on.

    PYTHONPATH=tests python tests/benchmarks/model_switch.py [--rounds 10] [--models A B]

One engine process that lists two models, by default two of the reference workload's shape in float32 (random weights),
behind a gateway. Requests of one token ask for either model in turn, so that each changes it; beside them stand
requests for the model that the engine has. The engine gives a model up as soon as another is asked for
(`min_serve_s` 0), and has a process ready that has imported the libraries.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from statistics import median

import httpx
from engine_throughput import make_model
from full_path import add_tokenizer
from support.processes.stack import Stack, running_stack
from support.processes.waiting import wait_until

LIMIT_S = 300.0
NAMES = ("demo", "other")


def complete(client: httpx.Client, model: str) -> float:
    """Run a request of one token to its end; return the seconds until then."""
    body = {"model": model, "prompt": [1, 2, 3], "max_tokens": 1, "temperature": 0, "ignore_eos": True}
    began = time.monotonic()
    client.post("/v1/completions", json=body).raise_for_status()
    return time.monotonic() - began


def num_processes(stack: Stack) -> int:
    """Return how many processes the engine has started that live: the model's, and the one that waits."""
    process = stack.engines[0].process
    if process is None:
        raise SystemExit("the engine has ended")
    tasks = Path(f"/proc/{process.pid}/task").iterdir()
    return len([child for task in tasks for child in (task / "children").read_text().split()])


def main() -> None:
    """Print a line for each round, then the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--models", type=Path, nargs=2, help="folders (default: two of the reference workload's shape)")
    parser.add_argument("--pause-s", type=float, default=8.0, help="before each change, for the next process' imports")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        models = options.models or [make_model(root / each, "float32") for each in NAMES]
        if options.models is None:
            for model in models:
                add_tokenizer(model)
        os.environ |= {"PAGESTREAM_WORKER__MIN_SERVE_S": "0.01", "PAGESTREAM_WORKER__SWITCH_FINISH_S": "0.01"}
        flags = ["--device", "cpu", "--num-gpu-blocks-override", "2048", "--models", f"other={models[1]}"]
        with running_stack(root, model=models[0], engines=0, gateways=0, engine_options=flags) as stack:
            stack.add_engine()
            stack.add_gateway()
            stack.wait_ready()
            changes, others = list[float](), list[float]()
            with httpx.Client(base_url=stack.gateways[0].url, timeout=LIMIT_S) as client:
                complete(client, NAMES[0])
                for number in range(options.rounds):
                    time.sleep(options.pause_s)
                    wait_until(lambda: num_processes(stack) >= 2, "the next process", LIMIT_S)
                    changes.append(complete(client, NAMES[(number + 1) % 2]))
                    others.append(complete(client, NAMES[(number + 1) % 2]))
                    print(f"change {changes[-1]:.2f} s, then {others[-1] * 1000:.0f} ms", flush=True)
    print(f"request that changes the model: median {median(changes):.2f} s, {min(changes):.2f} to {max(changes):.2f}")
    print(f"request for the model that is there: median {median(others) * 1000:.0f} ms")


if __name__ == "__main__":
    main()
