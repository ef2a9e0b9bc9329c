"""Times every kernel on this machine's GPU, against the bandwidth of a copy measured in the same run.

python tests/benchmarks/kernels/run.py [KERNEL ...] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import bench_filter_and_draw
import bench_fixed_order_matmul
import bench_paged_decode
import bench_paged_prefill
import bench_rms_norm
import bench_rope_and_cache
import bench_silu_and_mul
import torch
from measure import Workload, copy_bandwidth, measure

KERNELS: dict[str, Callable[..., Iterator[Workload]]] = {
    "filter_and_draw": bench_filter_and_draw.workloads,
    "fixed_order_matmul": bench_fixed_order_matmul.workloads,
    "paged_decode": bench_paged_decode.workloads,
    "paged_prefill": bench_paged_prefill.workloads,
    "rms_norm": bench_rms_norm.workloads,
    "rope_and_cache": bench_rope_and_cache.workloads,
    "silu_and_mul": bench_silu_and_mul.workloads,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kernels", nargs="*", choices=[[], *KERNELS], help="default: all")
    parser.add_argument("--json", type=Path, help="also write the measurements here")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("The kernel benchmarks need a GPU that torch can use; this machine has none.", file=sys.stderr)
        return 2
    bandwidth = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}: copy {bandwidth / 1e9:.0f} GB/s")
    measurements = []
    for name in options.kernels or KERNELS:
        for workload in KERNELS[name](torch.device("cuda")):
            result = measure(workload, bandwidth)
            measurements.append(result)
            print(
                f"{result.name:<55} {result.milliseconds:9.4f} ms {result.gigabytes_per_s:8.0f} GB/s "
                f"{result.copy_ratio:6.1%} of copy {result.teraflops:7.1f} TFLOP/s",
                flush=True,
            )
    if options.json is not None:
        record = {"gpu": torch.cuda.get_device_name(), "copy_gigabytes_per_s": bandwidth / 1e9}
        options.json.write_text(json.dumps({**record, "kernels": [asdict(item) for item in measurements]}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
