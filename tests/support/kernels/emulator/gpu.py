"""A GPU that is emulated: Triton compiles for it, our own `Launcher` launches, and the host executes the PTX."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import count
from typing import Any
from unittest.mock import patch
from weakref import WeakKeyDictionary

import torch
from pagestream_kernels.aot import TARGETS, Target
from pagestream_kernels.lora import LoraMatrices, LoraTable
from pagestream_kernels.prebuild import AbsentGPU
from pagestream_kernels.runtime import Variant, triton
from support.kernels.emulator.machine import kernel_of
from support.kernels.emulator.memory import GlobalMemory
from torch import Tensor

EMULATED: Mapping[str, Target] = {
    "sm_80": TARGETS["sm_80"],
    "sm_89": Target(
        "sm_89", "cuda", 89, 32, shared_limit=99 * 1024, shared_total=100 * 1024, registers=65536, spill_limit=16
    ),
}
"""The GPU families whose instructions are emulated: those before `wgmma`. sm_80 has no float8."""

Change = Callable[[str, str], str]
"""Gets a kernel's name and its PTX; returns what is executed."""

_numbers = count(1000)  # of devices: launchers keep what they compiled by it


class EmulatedGPU(AbsentGPU):
    """What Triton asks of a driver; it keeps PTX in place of machine code.

    Args:
        change: what to execute in place of a kernel's PTX.
    """

    def __init__(self, target: Target, change: Change | None = None) -> None:
        super().__init__(target, next(_numbers))
        self.order = random.Random(0)
        """Of warps and programs."""
        self.memory = GlobalMemory([])
        """What the next launch may touch."""
        self.num_launches = 0
        self.utils = _Utils(target, change)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        kinds = list(source.signature.values())
        if metadata.global_scratch_size or metadata.profile_scratch_size:
            raise NotImplementedError(f"{source.name} needs scratch memory")

        def launch(*given: Any) -> None:
            """Get what `CudaLauncher.__call__` gets."""
            x, y, z, _, ptx, packed, *rest = given
            num_warps, _, shared_bytes = packed
            arguments = [_bits(value, kind) for value, kind in zip(rest[3:], kinds, strict=True) if kind != "constexpr"]
            self.num_launches += 1
            kernel_of(ptx).launch(
                [*arguments, 0, 0],  # no scratch
                (x, y, z),
                num_warps=num_warps,
                shared_bytes=shared_bytes,
                memory=self.memory,
                order=self.order,
            )

        return launch


class _Utils:
    def __init__(self, target: Target, change: Change | None) -> None:
        self._target = target
        self._change = change

    def get_device_properties(self, _: int) -> dict[str, int]:
        return {"max_shared_mem": self._target.shared_limit}

    def load_binary(self, name: str, ptx: bytes, *_: Any) -> tuple[object, str, int, int, int]:
        text = ptx.decode()
        return object(), text if self._change is None else self._change(name, text), 0, 0, 1024


def _bits(value: Any, kind: str) -> int:
    if isinstance(value, Tensor):
        return value.data_ptr()
    return int(struct.unpack("<I", struct.pack("<f", value))[0]) if kind == "fp32" else int(value)


@lru_cache
def gpu_of(target: str) -> EmulatedGPU:
    """The emulated GPU of a family: one a process, since launchers keep what they compiled for it."""
    return EmulatedGPU(EMULATED[target])


@contextmanager
def emulated(gpu: EmulatedGPU) -> Iterator[EmulatedGPU]:
    """Within the block kernels run on an emulated GPU, whose memory is the host's; new tensors are NaN.

    A launch may touch the tensors that it is given, and the matrices of a table of adapters that it is given.
    """
    launch, put = Variant.launch, LoraTable.put
    adapters: WeakKeyDictionary[LoraTable, dict[int, Sequence[LoraMatrices | None]]] = WeakKeyDictionary()

    def launch_checked(variant: Variant, grid: tuple[int, ...], arguments: Mapping[str, Any]) -> None:
        tensors = [value for value in arguments.values() if isinstance(value, Tensor)]
        for table, slots in adapters.items():
            if any(tensor is table.entries for tensor in tensors):
                found = [each for matrices in slots.values() for each in matrices if each is not None]
                tensors += [tensor for each in found for tensor in (each.a, each.b)]
        gpu.memory = GlobalMemory(tensors)
        launch(variant, grid, arguments)

    def put_noted(table: LoraTable, slot: int, matrices: Sequence[LoraMatrices | None]) -> None:
        put(table, slot, matrices)
        adapters.setdefault(table, {})[slot] = matrices

    was_deterministic = torch.are_deterministic_algorithms_enabled()
    only_warned = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    triton.runtime.driver.set_active(gpu)
    try:
        with (
            patch.object(Variant, "launch", launch_checked),
            patch.object(LoraTable, "put", put_noted),
            patch.object(triton.knobs.runtime, "add_stages_inspection_hook", _keep_ptx),
        ):
            yield gpu
    finally:
        triton.runtime.driver.set_active(None)
        torch.use_deterministic_algorithms(was_deterministic, warn_only=only_warned)


def _keep_ptx(*given: Any) -> tuple[str, str] | None:
    """Triton's hook of its stages: let PTX pass for machine code."""
    if not given:
        return "ptx", "ptx"  # in the names of cached builds
    stages = given[1]
    stages["cubin"] = lambda ptx, metadata: ptx.encode()
    return None
