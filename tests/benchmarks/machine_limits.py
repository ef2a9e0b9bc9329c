"""What this machine can do at most: bytes a second from memory, multiply-adds a second, and its instruction sets."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter, thread_time

import torch
from pagestream_engine.cpu import instruction_sets, read_cpuinfo
from pagestream_engine.native_build import NativeLibrary, cached

_FLAGS = ("-O3", "-std=c++17", "-fopenmp", "-shared", "-fPIC", "-march=native", "-Wno-psabi")
_READ_BYTES = 1 << 29
"""Far more than the last cache holds."""
_ROUNDS = 1 << 20
_REPEATS = 8
_NAMED_SETS = ("avx2", "fma", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "asimd", "bf16")


@dataclass(frozen=True)
class MachineLimits:
    """Measured with the threads that the model has."""

    processor: str
    instruction_sets: tuple[str, ...]
    """Those that matter here, as `/proc/cpuinfo` names them."""
    threads: int
    bytes_per_s: float
    """Read from memory, in order."""
    float32_flops: float
    """A second, by fused multiply-adds."""
    bfloat16_flops: float
    """A second, by products of bfloat16 pairs added in float32; `float32_flops` where the processor has none. Tiles
    (AMX) are not counted."""

    def seconds(self, num_bytes: float, flops: float, dtype: torch.dtype) -> float:
        """Return the shortest time for so much work."""
        rate = self.bfloat16_flops if dtype == torch.bfloat16 else self.float32_flops
        return max(num_bytes / self.bytes_per_s, flops / rate)

    def or_better(self, other: MachineLimits) -> MachineLimits:
        """Return the higher rates of two measurements: other load only lowers them."""
        return replace(
            self,
            bytes_per_s=max(self.bytes_per_s, other.bytes_per_s),
            float32_flops=max(self.float32_flops, other.float32_flops),
            bfloat16_flops=max(self.bfloat16_flops, other.bfloat16_flops),
        )


def clock() -> float:
    """Return seconds: of the processor where torch has one thread, so that other load hardly counts; else of a clock on
    the wall."""
    return thread_time() if torch.get_num_threads() == 1 else perf_counter()


def measure_limits(threads: int) -> MachineLimits:
    """Measure this machine; takes about a second.

    Raises:
        CompilerNotFound: there is no C++ compiler.
        NativeBuildError: it failed.
    """
    source = Path(__file__).with_suffix(".cpp")
    library = ctypes.CDLL(str(cached(NativeLibrary("machine-limits", source, _FLAGS))))
    library.read_memory.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int]
    library.read_memory.restype = ctypes.c_uint64
    data = torch.ones(_READ_BYTES + 64, dtype=torch.uint8)
    address = -(-data.data_ptr() // 64) * 64
    seconds = []
    for _ in range(_REPEATS):
        start = clock()
        library.read_memory(address, _READ_BYTES, threads)
        seconds.append(clock() - start)
    float32 = _flops(library, "multiply_add_float32", threads)
    text = read_cpuinfo()
    names = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    return MachineLimits(
        processor=names[0] if names else "unknown",
        instruction_sets=tuple(name for name in _NAMED_SETS if name in instruction_sets(text)),
        threads=threads,
        bytes_per_s=_READ_BYTES / min(seconds),
        float32_flops=float32,
        bfloat16_flops=_flops(library, "multiply_add_bfloat16", threads) or float32,
    )


def _flops(library: ctypes.CDLL, name: str, threads: int) -> float:
    function = getattr(library, name)
    function.argtypes, function.restype = [ctypes.c_int64, ctypes.c_int], ctypes.c_double
    best = 0.0
    for _ in range(_REPEATS):
        start = clock()
        done: float = function(_ROUNDS, threads)
        best = max(best, done / (clock() - start))
    return best
