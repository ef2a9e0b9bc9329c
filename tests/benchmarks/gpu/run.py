"""All that needs a GPU, in one run: correctness, then figures; writes one JSON and the page made of it.

python tests/benchmarks/gpu/run.py [--json FILE] [--page FILE] [--dry-run] [--only SECTION ...]

With --dry-run every section runs its smallest case under Triton's interpreter, on any machine, and measures nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
TESTS_LIMIT_S = 240


def correctness() -> str:
    """Run tests/gpu, and return pytest's last line."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests/gpu"]
    environment = {**os.environ, "PAGESTREAM_REQUIRE": "gpu"}
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=TESTS_LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return f"not done within {TESTS_LIMIT_S} s"
    return (done.stdout.strip().splitlines() or ["no output"])[-1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=ROOT / "docs" / "benchmarks" / "gpu.json")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "benchmarks" / "gpu.md")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--only", nargs="*", metavar="SECTION", help="default: all")
    parser.add_argument("--without-tests", action="store_true", help="figures alone")
    options = parser.parse_args()
    if options.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    record = _run(options.only, dry=options.dry_run, tests=not options.without_tests)
    if record is None:
        print("make gpu needs a GPU that torch can use; this machine has none. Try --dry-run.", file=sys.stderr)
        return 2
    text = json.dumps(record, indent=2) + "\n"
    if options.dry_run:
        print(text)
        return 0
    from page import page

    options.json.write_text(text)
    options.page.write_text(page(record))
    if options.without_tests:
        return 0
    return 0 if " failed" not in record["correctness"] and " passed" in record["correctness"] else 1


def _run(only: list[str] | None, *, dry: bool, tests: bool) -> dict[str, Any] | None:
    import torch

    if not dry and not torch.cuda.is_available():
        return None
    sys.path.insert(0, str(ROOT / "tests" / "benchmarks" / "kernels"))
    import operators
    import serving
    from measure import copy_bandwidth

    device = torch.device("cpu" if dry else "cuda")
    copy = None if dry else copy_bandwidth()
    record: dict[str, Any] = {
        "gpu": None if dry else torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "copy_gigabytes_per_s": None if copy is None else copy / 1e9,
        "correctness": "not run" if dry or not tests else correctness(),
        "sections": {},
    }
    sections: dict[str, Callable[[], Iterable[dict[str, Any]]]] = {
        "decode": lambda: operators.decode(device, copy, dry=dry),
        "contiguous": lambda: operators.contiguous(device, copy, dry=dry),
        "prefill": lambda: operators.prefill(device, copy, dry=dry),
        "linears": lambda: operators.linears(device, copy, dry=dry),
        "sampling": lambda: operators.sampling(device, copy, dry=dry),
        "engine": lambda: serving.engine(device, dry=dry),
        "launch": lambda: _launch(device, dry=dry),
    }
    for name, section in sections.items():
        if not only or name in only:
            start = time.monotonic()
            record["sections"][name] = list(section())
            print(f"{name}: {time.monotonic() - start:.1f} s", file=sys.stderr, flush=True)
            if not dry:
                torch.cuda.empty_cache()
    return record


def _launch(device: Any, *, dry: bool) -> Iterable[dict[str, Any]]:
    if dry:  # the interpreter has no launches to time; test_launch_keys.py has their driver calls
        return []
    from launch_overhead import launch_overheads

    found = launch_overheads(device, rounds=30)
    return [{"name": each.kernel, "launcher_us": each.launcher_us, "triton_us": each.triton_us} for each in found]


if __name__ == "__main__":
    sys.exit(main())
