"""Triton, where it is installed, and what a launch needs to know about the machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, TypeAlias

import torch

from pagestream_kernels.errors import KernelUnavailableError
from pagestream_kernels.launcher import ALIGNMENT, Launcher

try:
    import triton
    import triton.language as tl
except ImportError:  # the references stay usable
    triton = None
    tl = None

__all__ = [
    "ALIGNMENT",
    "INTERPRETED",
    "Backend",
    "Kernel",
    "Variant",
    "can_launch",
    "cdiv",
    "compiling_only",
    "current_backend",
    "ieee_dot",
    "jit",
    "kernel",
    "needs_upcast",
    "next_power_of_two",
    "num_processors",
    "pointer_to",
    "require_launchable",
    "soft_capped",
    "tl",
    "triton",
]

Backend: TypeAlias = Literal["cuda", "hip"]

INTERPRETED: bool = triton is not None and bool(triton.knobs.runtime.interpret)
"""Whether the kernels of this process run under Triton's interpreter; fixed when Triton is imported."""

_is_compiling_only: ContextVar[bool] = ContextVar("is_compiling_only", default=False)

INTERPRETER_PROCESSORS = 4
"""The interpreter runs one program at a time; it plays a small GPU, so that work is split there too."""


def jit(function: Callable[..., Any]) -> Any:
    """`triton.jit`, or the plain function where Triton is not installed."""
    return function if triton is None else triton.jit(function)


@dataclass(frozen=True, slots=True)
class Kernel:
    """A Triton function that is compiled once for all parts of a tensor and all sizes of a step.

    Triton compiles again for another alignment of a pointer, and for an integer that is 1 or a multiple of 16 now.
    `Variant.launch` therefore takes one of two functions, by the strides of the tensors that steps cut into parts.
    """

    packed: Any  # all strides are multiples of 16 elements: every part of a tensor is aligned as the whole is
    loose: Any  # any strides: single elements are loaded and stored
    strides: tuple[str, ...]  # the arguments that decide
    varying: tuple[str, ...]  # what neither function is compiled by
    parts: tuple[str, ...]  # what `loose` is not compiled by beside them

    def choose(self, arguments: Mapping[str, Any]) -> tuple[Any, tuple[str, ...]]:
        """Return the function for these arguments of a launch, and what it is not compiled by."""
        for name in self.strides:
            if arguments[name] % ALIGNMENT:
                return self.loose, (*self.varying, *self.parts)
        return self.packed, self.varying


def kernel(
    *varying: str, pointers: Sequence[str] = (), strides: Sequence[str] = ()
) -> Callable[[Callable[..., Any]], Kernel]:
    """Make a Kernel of a function; without Triton a launch says that it is missing.

    Strides are annotated as `tl.tensor`: int32 where a stride fits and int64 where not. What is annotated as `int` is
    an int32 always. A product of an index and a stride is taken in int64.

    Args:
        varying: arguments that change from step to step and never decide the machine code.
        pointers: tensors of which a step may pass any part, and whose alignment allows wider loads and stores.
        strides: the strides of these tensors.
    """

    def decorate(function: Callable[..., Any]) -> Kernel:
        if triton is None:
            return Kernel(function, function, tuple(strides), varying, ())
        parts = (*pointers, *strides)
        return Kernel(
            packed=triton.jit(function, do_not_specialize=[*varying]),
            loose=triton.jit(function, do_not_specialize=[*varying, *parts]),
            strides=tuple(strides),
            varying=varying,
            parts=parts,
        )

    return decorate


@dataclass(frozen=True, slots=True)
class Variant:
    """One specialisation of a kernel: everything that its machine code depends on.

    The launcher and the ahead-of-time compiler both start from it, so what is compiled in the tests is what runs.
    """

    kernel: Kernel
    signature: Mapping[str, str]  # runtime argument -> Triton type, in any order
    constants: Mapping[str, Any]  # compile-time argument -> value
    num_warps: int
    num_stages: int
    unit_strides: tuple[str, ...] = field(default=())  # arguments that are 1 for every usual layout: Triton folds them

    _launchers: dict[int, Launcher] = field(default_factory=dict, init=False, repr=False, compare=False)

    def launch(self, grid: tuple[int, ...], arguments: Mapping[str, Any]) -> None:
        """Start the kernel; a grid without programs starts nothing."""
        if 0 in grid:
            return
        function, unspecialised = self.kernel.choose(arguments)
        if _is_compiling_only.get():
            function.warmup(**arguments, **self.constants, **self._options, grid=grid)
            return
        launcher = self._launchers.get(id(function))
        if launcher is None:
            launcher = Launcher(function, self.signature, self.constants, unspecialised, self._options)
            self._launchers[id(function)] = launcher
        if INTERPRETED:
            launcher.interpret(grid, arguments)
        else:
            launcher.launch(grid, arguments)

    @property
    def _options(self) -> dict[str, int]:
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}


_TRITON_NAMES: Mapping[torch.dtype, str] = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.uint8: "u8",
    torch.int32: "i32",
    torch.int64: "i64",
}


def pointer_to(dtype: torch.dtype) -> str:
    """The signature type of a pointer to `dtype`: `*fp16`."""
    return "*" + _TRITON_NAMES[dtype]


@contextmanager
def compiling_only() -> Iterator[None]:
    """Within the block a launch on any tensors compiles its kernel for the active driver's GPU, and starts nothing."""
    token = _is_compiling_only.set(True)
    try:
        yield
    finally:
        _is_compiling_only.reset(token)


def current_backend() -> Backend:
    """Which compiler a launch in this process uses."""
    return "hip" if torch.version.hip is not None else "cuda"


def can_launch(device: torch.device) -> bool:
    """Whether kernels run on tensors of `device` in this process: on a GPU, interpreted, or by a driver for it."""
    return device.type == "cuda" or INTERPRETED or _has_driver(device)


def _has_driver(device: torch.device) -> bool:
    """Whether Triton's active driver is one that stands in for a GPU's and launches on tensors of `device`."""
    if triton is None:
        return False
    try:
        return bool(triton.runtime.driver.active.get_active_torch_device().type == device.type)
    except (AttributeError, RuntimeError):  # one that only compiles, or no driver at all
        return False


def require_launchable(device: torch.device, *, reference: str) -> None:
    """Raise KernelUnavailableError unless a kernel can run on tensors of `device` in this process."""
    if triton is None:
        raise KernelUnavailableError(f"Triton is not installed; use {reference} or install triton==3.7.1")
    if _is_compiling_only.get():
        return
    if not can_launch(device):
        raise KernelUnavailableError(
            f"tensors are on {device}, and a compiled kernel needs a GPU; use {reference}, or set TRITON_INTERPRET=1 "
            "before Triton is imported"
        )


@lru_cache(maxsize=16)
def num_processors(device: torch.device) -> int:
    """Streaming multiprocessors (compute units) of a GPU."""
    if device.type != "cuda":
        return INTERPRETER_PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def cdiv(numerator: int, denominator: int) -> int:
    """Division rounded up."""
    return -(-numerator // denominator)


def next_power_of_two(value: int) -> int:
    """The smallest power of two that is at least `value` (>= 1)."""
    return 1 << (value - 1).bit_length()


@jit
def ieee_dot(left: tl.tensor, right: tl.tensor, UPCAST: tl.constexpr) -> tl.tensor:
    """`left @ right` in float32; float32 tiles are not cut to tf32."""
    if UPCAST:
        left = left.to(tl.float32)
        right = right.to(tl.float32)
    return tl.dot(left, right, input_precision="ieee")


@jit
def soft_capped(scores: tl.tensor, factor: tl.tensor) -> tl.tensor:
    """`factor * tanh(scores)`; an exponential that overflows gives the bound itself."""
    return factor * (1.0 - 2.0 / (tl.exp2(scores * 2.8853900817779268) + 1.0))


def needs_upcast(dtype: torch.dtype) -> bool:
    """Triton's interpreter keeps bfloat16 as integers and would multiply those; float32 holds the same products."""
    return INTERPRETED and dtype == torch.bfloat16
