"""All pairs of values of every kernel's factors by compiled code, on each GPU that is emulated.

`make deep PARTS=emulated`. Cases that passed are recorded in the user's cache until a source changes.
"""

from __future__ import annotations

import argparse
import os
import queue
import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kernels.cache import ResultCache
from support.kernels.emulator.gpu import EMULATED
from support.kernels.worker import KernelWorker
from support.pairwise import Case

from kernels import emulated as runs

Item = tuple[str, str, Case]
LIMIT_S = 900.0
"""Of one case; the longest takes a minute of a busy machine."""


class Results:
    """What passed and what failed, shared by the threads that run cases."""

    def __init__(self, cache: ResultCache, total: int, remembered: int) -> None:
        self._cache = cache
        self._lock = threading.Lock()
        self._total = total
        self._passed = remembered
        self.num_failed = 0

    def note(self, item: Item, error: str | None) -> None:
        target, kernel, case = item
        with self._lock:
            if error is None:
                self._passed += 1
                self._cache.put(kernel, {"target": target, **case}, {})
            else:
                self.num_failed += 1
                print(f"{target} {kernel} {case}\n{error}", file=sys.stderr, flush=True)

    def line(self) -> str:
        return f"{self._passed} of {self._total} passed, {self.num_failed} failed"


def work(items: queue.SimpleQueue[Item], results: Results) -> None:
    """Run cases in a process where Triton compiles, until none is left."""
    with KernelWorker("compile") as worker:
        while True:
            try:
                item = items.get_nowait()
            except queue.Empty:
                return
            try:
                worker.run(runs.check, *item, limit_s=LIMIT_S)
            except (AssertionError, BrokenPipeError) as error:
                results.note(item, str(error))
            else:
                results.note(item, None)


def main() -> int:
    parser: Any = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kernels", nargs="*", help="default: all")
    parser.add_argument("--target", choices=EMULATED, help="default: both")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: cores)")
    options = parser.parse_args()
    targets = [options.target] if options.target else list(EMULATED)
    everything = [(target, kernel, case) for target in targets for kernel, case in runs.cover(target)]
    if options.kernels:
        everything = [item for item in everything if item[1] in options.kernels]
    cache = ResultCache("emulate")
    missing = [item for item in everything if cache.get(item[1], {"target": item[0], **item[2]}) is None]
    results = Results(cache, len(everything), len(everything) - len(missing))
    items: queue.SimpleQueue[Item] = queue.SimpleQueue()
    for item in missing:
        items.put(item)
    threads = [threading.Thread(target=work, args=(items, results)) for _ in range(min(options.jobs, len(missing)))]
    for thread in threads:
        thread.start()
    shown = time.monotonic()
    for thread in threads:
        while thread.is_alive():
            thread.join(1.0)
            if time.monotonic() - shown >= 10.0:
                shown = time.monotonic()
                print(results.line(), flush=True)
    print(results.line(), flush=True)
    return 1 if results.num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
