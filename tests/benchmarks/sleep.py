"""Memory of an engine's process awake, asleep with its weights and awake again, and the seconds of each change.

`python tests/benchmarks/sleep.py [--rounds N] [--model FOLDER] [--blocks N]`: an engine process behind a gateway, by
default with the reference workload's model in float32 (random weights). Requests write to its KV cache before a sleep.
RSS is that of the process with the model. "wake" and "load" are from the call to the end of a request of one token that
waits for it: after a sleep of level 1, and of level 2.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from engine_throughput import make_model
from full_path import add_tokenizer
from support.processes.stack import Stack, running_stack
from support.processes.waiting import wait_until

LIMIT_S = 300.0
TITLE = b"pagestream-engine-core"
BODY = {"model": "demo", "max_tokens": 1, "temperature": 0, "ignore_eos": True}
PROMPTS = [[number + place for place in range(128)] for number in range(16)]


def rss_mib(stack: Stack) -> float:
    """Return the RSS of the largest engine process below the worker: the other one waits for a model."""
    process = stack.engines[0].process
    if process is None:
        raise SystemExit("the engine has ended")
    sizes = [0.0]
    for task in Path(f"/proc/{process.pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            if TITLE in Path(f"/proc/{child}/cmdline").read_bytes():
                fields = Path(f"/proc/{child}/status").read_text().splitlines()
                sizes += [int(line.split()[1]) / 1024 for line in fields if line.startswith("VmRSS:")]
    return max(sizes)


def complete(client: httpx.Client, prompts: list[list[int]]) -> float:
    """Run prompts to their end; return the seconds until then."""
    began = time.monotonic()
    client.post("/v1/completions", json={**BODY, "prompt": prompts}).raise_for_status()
    return time.monotonic() - began


def sleep(client: httpx.Client, level: int) -> float:
    """Put the engine to sleep; return the seconds that it took, read each 10 ms."""
    began = time.monotonic()
    client.post(f"/sleep?level={level}").raise_for_status()
    wait_until(lambda: client.get("/is_sleeping").json()["is_sleeping"], "the engine sleeps", LIMIT_S)
    return time.monotonic() - began


def main() -> None:
    """Print a line for each round, then the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", type=Path, help="folder (default: the reference workload's model)")
    parser.add_argument("--blocks", type=int, default=2048, help="KV blocks of 16 tokens")
    options = parser.parse_args()
    rows: list[dict[str, float]] = []
    os.environ["PAGESTREAM_GATEWAY__ALLOW_MODEL_CHANGES"] = "true"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = options.model
        if model is None:
            model = make_model(folder / "model", "float32")
            add_tokenizer(model)
        flags = ["--device", "cpu", "--num-gpu-blocks-override", str(options.blocks), "--enable-sleep-mode"]
        with running_stack(folder, model=model, engines=0, gateways=0, engine_options=flags) as stack:
            stack.add_engine()
            stack.add_gateway()
            stack.wait_ready()
            with httpx.Client(base_url=stack.gateways[0].url, timeout=LIMIT_S) as client:
                for _ in range(options.rounds):
                    row = {"busy_s": complete(client, PROMPTS), "awake_mib": rss_mib(stack)}
                    row |= {"sleep_1_s": sleep(client, 1), "asleep_mib": rss_mib(stack)}
                    row |= {"wake_s": complete(client, [[1]]), "woken_mib": rss_mib(stack)}
                    row |= {"sleep_2_s": sleep(client, 2)}
                    row |= {"load_s": complete(client, [[1]]), "loaded_mib": rss_mib(stack)}
                    rows.append(row)
                    print({name: round(value, 2) for name, value in row.items()}, flush=True)
    for name in rows[0]:
        values = [row[name] for row in rows]
        print(f"{name}: median {statistics.median(values):.2f}, {min(values):.2f} to {max(values):.2f}")


if __name__ == "__main__":
    main()
