"""Pause of a stream whose engine is killed, and the memory of a spare: `pagestream serve` with and without one.

`python tests/benchmarks/warm_spare.py [--rounds N] [--model FOLDER]`: both serves run in turns, one engine each. PSS is
that of the spare's two processes while it stands by; pages that engines share count in parts.
"""

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.processes.served import Served, running_serve
from support.processes.waiting import wait_until

LIMIT_S = 120.0
NUM_TOKENS = 400
KILLED_AFTER = 40
BODY = {"prompt": "One evening", "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}


def descendants(pid: int) -> list[int]:
    """Return a process and all its children."""
    found = [pid]
    for each in found:
        for task in Path(f"/proc/{each}/task").iterdir():
            found += [int(child) for child in (task / "children").read_text().split()]
    return found


def pss_mib(pid: int) -> float:
    """Return the proportional set size of a process and its children in MiB."""
    total = 0
    for each in descendants(pid):
        lines = Path(f"/proc/{each}/smaps_rollup").read_text().splitlines()
        total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total / 1024


def engines(served: Served, *, is_spare: bool) -> list[int]:
    """Return the process ids of living engines of a role."""
    parts = [part for part in served.record.processes if part.name.startswith("engine-")]
    return [part.pid for part in parts if part.pid is not None and part.is_spare == is_spare]


def is_warm(served: Served) -> bool:
    """Whether each spare has said that it stands by since its last start."""
    spares = [part for part in served.record.processes if part.is_spare]
    return all(part.pid is not None and "standing by" in Path(part.log).read_text()[-2000:] for part in spares)


def pause_s(served: Served) -> float:
    """Kill the engine of a stream; return the seconds from the signal to the stream's next event."""
    arrived, killed_at = 0, 0.0
    url = f"{served.record.http_urls()[0]}/v1/completions"
    with httpx.stream("POST", url, json={"model": served.record.model, **BODY}, timeout=LIMIT_S) as response:
        for line in response.iter_lines():
            if not line.startswith("data: {") or not any(each["text"] for each in json.loads(line[6:])["choices"]):
                continue
            arrived += 1
            if killed_at and arrived > KILLED_AFTER + 1:
                pause = time.monotonic() - killed_at
                if pause > 0.02:  # what had been sent before the signal comes at once
                    return pause
            if arrived == KILLED_AFTER:
                for pid in engines(served, is_spare=False):
                    os.kill(pid, signal.SIGKILL)
                killed_at = time.monotonic()
    raise RuntimeError("the stream ended before its engine was missed")


def main() -> None:
    """Print a line for each round, then the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", help="folder (default: the demo model)")
    arguments = parser.parse_args()
    pauses: dict[int, list[float]] = {0: [], 1: []}
    memory: list[float] = []
    model = [arguments.model] if arguments.model else []
    for _ in range(arguments.rounds):
        for spares, measured in pauses.items():
            with (
                tempfile.TemporaryDirectory() as folder,
                running_serve(Path(folder), *model, "--warm-spares", str(spares)) as served,
            ):
                wait_until(lambda served=served: is_warm(served), "the spare stands by", LIMIT_S)
                time.sleep(1.0)
                if spares:
                    memory.append(pss_mib(engines(served, is_spare=True)[0]))
                measured.append(pause_s(served))
        print({spares: round(each[-1], 3) for spares, each in pauses.items()}, f"{memory[-1]:.0f} MiB", flush=True)
    for spares, each in pauses.items():
        print(f"{spares} spares: median {statistics.median(each):.3f} s, {min(each):.3f} to {max(each):.3f} s")
    print(f"PSS of a spare: median {statistics.median(memory):.0f} MiB")


if __name__ == "__main__":
    main()
