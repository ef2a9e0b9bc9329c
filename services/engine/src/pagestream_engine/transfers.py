"""Numbers between host and device: one copy a step each way, and nothing waits but for a step's results.

On a CPU nothing is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Integers = npt.NDArray[np.int32] | npt.NDArray[np.int64]
_FIRST_CAPACITY = 4096  # numbers
MAX_SLAB_BYTES = 1 << 30
"""Of pinned memory that is allocated at once."""


class PackedUpload:
    """Puts all arrays of a step into one buffer, which is copied at once.

    Two buffers in pinned memory take turns, so that a step can be prepared while the copy of the one before it waits
    for its turn on the device. A buffer is written again when the event after its copy has occurred: that of the step
    before the last, whose results the host has waited for by then, so that it waits for no event in practice.

    int64 in place of int32 spares an operation for each array that something is indexed by; the largest step has less
    than 200 kB of them.

    Args:
        device: a GPU; on a CPU the buffers are ordinary memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_cuda = device.type == "cuda"
        self._buffers = [self._buffer(_FIRST_CAPACITY) for _ in range(2)]
        self._copied: list[torch.cuda.Event | None] = [None, None]
        self._turn = 0

    def send(self, arrays: Sequence[Integers]) -> list[Tensor]:
        """Return arrays on the device as int64, which operations index by, in their shapes."""
        sizes = [array.size for array in arrays]
        total = sum(sizes)
        self._turn = turn = 1 - self._turn
        copied = self._copied[turn]
        # Has occurred already: the host collected a later step's result before this buffer's turn came again.
        if copied is not None:
            copied.synchronize()
        if total > len(self._buffers[turn]):
            self._buffers[turn] = self._buffer(1 << (total - 1).bit_length())
        buffer = self._buffers[turn][:total]
        if arrays:
            np.concatenate([array.reshape(-1) for array in arrays], out=buffer.numpy(), casting="same_kind")
        on_device = torch.empty(total, dtype=torch.int64, device=self._device)
        on_device.copy_(buffer, non_blocking=True)
        if self._is_cuda:
            self._copied[turn] = _event()
        return [part.view(array.shape) for part, array in zip(torch.split(on_device, sizes), arrays, strict=True)]

    def _buffer(self, capacity: int) -> Tensor:
        return torch.empty(capacity, dtype=torch.int64, pin_memory=self._is_cuda)


def upload_to(device: torch.device) -> PackedUpload | None:
    """Return what sends a step's numbers to a device; None for a CPU, which shares the host's memory."""
    return None if device.type == "cpu" else PackedUpload(device)


def to_device(numbers: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor of the host, to a GPU from pinned memory, so that the call does not wait; on a CPU it is the tensor
    itself.

    For what is sent when a sequence comes or goes. What each step sends goes through an `Upload`.
    """
    return numbers.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else numbers.to(device)


def download(tensors: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
    """Start to copy tensors of one device to the host; what is returned waits for them, and for nothing after them."""
    if not any(tensor.is_cuda for tensor in tensors):
        return lambda: list(tensors)
    packed = pack(tensors)
    host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
    host.copy_(packed, non_blocking=True)
    copied = _event()
    shapes = [(tensor.shape, tensor.is_floating_point()) for tensor in tensors]

    def wait() -> list[Tensor]:
        copied.synchronize()
        return unpack(host, shapes)

    return wait


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """Put tensors one after the other into one of int32, where they are: integers of up to 32 bits, and floating point
    numbers as float32."""
    packed = torch.empty(sum(tensor.numel() for tensor in tensors), dtype=torch.int32, device=tensors[0].device)
    parts = torch.split(packed, [tensor.numel() for tensor in tensors])
    for part, tensor in zip(parts, tensors, strict=True):
        own = part.view(torch.float32) if tensor.is_floating_point() else part
        own.view(tensor.shape).copy_(tensor)
    return packed


def unpack(packed: Tensor, shapes: Sequence[tuple[torch.Size, bool]]) -> list[Tensor]:
    """Return what `pack` has packed, as int32 and float32.

    Args:
        shapes: of each tensor, and whether it has floating point numbers.
    """
    parts = torch.split(packed, [prod(shape) for shape, _ in shapes])
    return [
        (part.view(torch.float32) if is_float else part).view(shape)
        for part, (shape, is_float) in zip(parts, shapes, strict=True)
    ]


def slab_pages(num_bytes: int, page_bytes: int, *, pinned: bool) -> list[int]:
    """Return how many pages each allocation holds, so that all of them take at most `num_bytes`.

    torch rounds pinned memory up to a power of two: 33 GiB at once would take 64. Each allocation is therefore as many
    pages as fit into a power of two of bytes, the largest first: less than a page is lost in each, and less than two
    behind the last. Other memory is one allocation.
    """
    if not pinned:
        return [num_bytes // page_bytes] if num_bytes >= page_bytes else []
    most = max(MAX_SLAB_BYTES, 1 << (page_bytes - 1).bit_length())
    slabs = []
    while num_bytes >= page_bytes:
        slab = min(most, 1 << (num_bytes.bit_length() - 1))
        if slab < page_bytes:
            break
        slabs.append(slab // page_bytes)
        num_bytes -= slab
    return slabs


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event
