"""The full product of kernel cases under the interpreter, and of builds for every target: `make kernels`.

Cases that passed are recorded under `.kernel-cache/` until a source changes: an interrupted campaign resumes, and
one of unchanged kernels ends at once.
"""

from __future__ import annotations

import argparse
import os
import queue
import random
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.kernels import builds as kernel_builds
from support.kernels import cases as kernel_cases
from support.kernels.cache import ResultCache
from support.kernels.worker import KernelWorker, Mode
from support.pairwise import product

Item = tuple[str, dict[str, Any]]
MODES: tuple[Mode, ...] = ("interpret", "compile")
REPORT_INTERVAL_S = 10.0


@dataclass
class Progress:
    """Counts of one mode, shared by its workers."""

    total: int
    remembered: int
    passed: int = 0
    failures: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def line(self) -> str:
        done = self.remembered + self.passed
        return f"{done} of {self.total} passed ({self.remembered} remembered), {len(self.failures)} failed"


def items_of(mode: Mode, kernels: list[str]) -> list[Item]:
    if mode == "interpret":
        return [(kernel, case) for kernel in kernels for case in kernel_cases.full_product(kernel)]
    return [(kernel, case) for kernel in kernels for case in product(kernel_builds.FACTORS[kernel])]


def work(mode: Mode, items: queue.SimpleQueue[Item], cache: ResultCache, progress: Progress) -> None:
    """Run cases in a worker process; a worker that dies fails its case and is replaced."""
    worker: KernelWorker | None = None
    try:
        while True:
            try:
                kernel, case = items.get_nowait()
            except queue.Empty:
                return
            worker = worker or KernelWorker(mode)
            try:
                result = worker.run(kernel, case)
            except (AssertionError, BrokenPipeError) as error:
                with progress.lock:
                    progress.failures.append(str(error))
                    print(error, file=sys.stderr, flush=True)  # now: a campaign of hours may be cut short
                worker.close()
                worker = None
                continue
            with progress.lock:
                cache.put(kernel, case, result)
                progress.passed += 1
    finally:
        if worker is not None:
            worker.close()


def run_mode(mode: Mode, kernels: list[str], jobs: int) -> Progress:
    cache = ResultCache(mode)
    everything = items_of(mode, kernels)
    missing = [item for item in everything if cache.get(*item) is None]
    random.Random(0).shuffle(missing)  # shuffled, so that a campaign that is cut short has covered all kernels
    progress = Progress(total=len(everything), remembered=len(everything) - len(missing))
    items: queue.SimpleQueue[Item] = queue.SimpleQueue()
    for item in missing:
        items.put(item)
    threads = [
        threading.Thread(target=work, args=(mode, items, cache, progress)) for _ in range(min(jobs, len(missing)))
    ]
    for thread in threads:
        thread.start()
    report(mode, threads, progress)
    return progress


def report(mode: Mode, threads: list[threading.Thread], progress: Progress) -> None:
    """Print the counts until the threads end: on a terminal in one line, otherwise line by line."""
    begin, end = ("\r", "") if sys.stdout.isatty() else ("", "\n")
    shown = time.monotonic()
    for thread in threads:
        while thread.is_alive():
            thread.join(1.0)
            if time.monotonic() - shown >= (1.0 if end == "" else REPORT_INTERVAL_S):
                shown = time.monotonic()
                print(f"{begin}{mode}: {progress.line()}", end=end, flush=True)
    print(f"{begin}{mode}: {progress.line()}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kernels", nargs="*", choices=[[], *kernel_cases.FACTORS], help="default: all")
    parser.add_argument("--mode", choices=MODES, help="default: both")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="worker processes (default: cores)")
    options = parser.parse_args()
    kernels = options.kernels or list(kernel_cases.FACTORS)
    failed = 0
    for mode in [options.mode] if options.mode else MODES:
        failed += len(run_mode(mode, kernels, options.jobs).failures)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
