"""The full product of kernel cases under the interpreter, and of builds for every target: `make kernels`.

Cases that passed are recorded in the user's cache until a source changes: an interrupted campaign resumes, and
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
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kernels.cache import ResultCache
from support.kernels.worker import KernelWorker, Mode
from support.pairwise import product

from kernels import builds as kernel_builds
from kernels import cases as kernel_cases

Item = tuple[str, dict[str, Any]]
MODES: tuple[Mode, ...] = ("interpret", "compile")
CALLS: Mapping[Mode, Callable[..., object]] = {"interpret": kernel_cases.check, "compile": kernel_builds.build}
REPORT_INTERVAL_S = 10.0

# The campaign takes every combination of these; the other factors take a value that the combination's name picks.
PRODUCT_FACTORS: Mapping[str, Sequence[str]] = {
    "paged_decode": ("head_dim", "group_size", "block_size", "dtype", "lengths"),
    "plan_decode": ("lengths", "rows", "split_tokens", "window", "num_kv_heads"),
    "paged_prefill": ("head_dim", "group_size", "block_size", "dtype", "chunks"),
    "rope_and_cache": ("head_dim", "group_size", "block_size", "dtype", "tokens"),
    "rope_and_quantise": ("head_dim", "block_size", "dtype", "rotary", "norm", "interleaved"),
    "float8_attention": ("operator", "head_dim", "group_size", "block_size", "dtype", "window"),
    "copy_blocks": ("page", "dtype", "pools"),
    "rms_norm": ("shape", "dtype", "residual", "strided"),
    "silu_and_mul": ("shape", "dtype", "strided"),
    "filter_and_draw": ("shape", "top_k", "top_p", "min_p", "values"),
    "fixed_order_matmul": ("shape", "dtype", "bias", "strided"),
    "int8_matmul": ("shape", "group", "dtype", "bias"),
    "add_lora": ("shape", "ranks", "rows", "dtype"),
}


def full_product(kernel: str) -> list[dict[str, Any]]:
    """The campaign's cases of one kernel."""
    factors, primary = kernel_cases.FACTORS[kernel], PRODUCT_FACTORS[kernel]
    cases = []
    for combination in product({name: factors[name] for name in primary}):
        pick = zlib.crc32(kernel_cases.case_id(combination).encode())
        rest = {name: values for name, values in factors.items() if name not in primary}
        for name, values in rest.items():
            pick, index = divmod(pick, len(values))
            combination[name] = values[index]
        cases.append(combination)
    return cases


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
        return [(kernel, case) for kernel in kernels for case in full_product(kernel)]
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
                result = worker.run(CALLS[mode], kernel, case)
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
