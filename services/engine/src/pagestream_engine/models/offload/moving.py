"""Tensors that leave a GPU for host memory and come back, in place: whoever holds one finds it again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pagestream_engine.transfers import slab_pages

_PACKAGE = __name__.partition(".")[0]
_GRANULE_BYTES = 1 << 20
"""The host's memory is a multiple of this."""


def leaves_device(device: torch.device) -> bool:
    """Whether the weights of an engine that sleeps leave a device: a CPU's memory is where they would go."""
    return device.type == "cuda"


class MovedTensors:
    """What tensors of one device hold, in host memory. They have no memory of their own until `restore`.

    Storages are emptied and filled again, not replaced: all views of a storage stay views of it.
    """

    def __init__(self, tensors: Iterable[Tensor], device: torch.device) -> None:
        """Copy the tensors to host memory, pinned where they come from a GPU, and free theirs.

        Args:
            tensors: any, also views of each other; those of other kinds of devices stay as they are, and so does
                memory of others, such as an array's.
            device: where they lie.
        """
        on_device = (each.untyped_storage() for each in tensors if each.device.type == device.type)
        found = {each.data_ptr(): each for each in on_device if each.nbytes() and each.resizable()}
        self._device = device
        self._storages = [(storage, storage.nbytes()) for storage in found.values()]
        self.num_bytes = sum(size for _, size in self._storages)
        """Of the tensors."""
        is_cuda = device.type == "cuda"
        self._synchronize()  # a layer's page may still be on its way to a buffer, on another stream
        slabs = slab_pages(-(-self.num_bytes // _GRANULE_BYTES) * _GRANULE_BYTES, _GRANULE_BYTES, pinned=is_cuda)
        self._slabs = [torch.empty(count * _GRANULE_BYTES, dtype=torch.uint8, pin_memory=is_cuda) for count in slabs]
        for own, host in self._pieces():
            host.copy_(own, non_blocking=True)
        self._synchronize()  # nothing is freed before it is copied
        for storage, _ in self._storages:
            storage.resize_(0)

    def restore(self) -> None:
        """Allocate the tensors' memory, and fill it. To be called once.

        Raises:
            RuntimeError: the device has no such memory any more. The tensors are of no use then.
        """
        for storage, size in self._storages:
            storage.resize_(size)
        for own, host in self._pieces():
            own.copy_(host, non_blocking=True)
        self._synchronize()
        self._storages, self._slabs = [], []

    def _pieces(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield pieces of the storages with their places in the slabs, one after the other."""
        slabs = iter(self._slabs)
        room: Tensor = torch.empty(0, dtype=torch.uint8)
        for storage, _ in self._storages:
            left = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            while len(left):
                room = room if len(room) else next(slabs)
                count = min(len(left), len(room))
                yield left[:count], room[:count]
                left, room = left[count:], room[count:]

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def moved_tensors(roots: Sequence[object], device: torch.device) -> MovedTensors | None:
    """Move to host memory what objects of this package hold on a device; None where it stays."""
    return MovedTensors(tensors_of(roots), device) if leaves_device(device) else None


def tensors_of(roots: Sequence[object]) -> Iterator[Tensor]:
    """Yield the tensors that objects of this package hold, in attributes and containers at any depth.

    What objects of other packages hold is theirs, but for modules of torch.
    """
    seen: dict[int, Any] = {}
    waiting: list[Any] = list(roots)
    while waiting:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen[id(each)] = each
        if isinstance(each, Tensor):
            yield each
        elif isinstance(each, dict):
            waiting += each.values()
        elif isinstance(each, list | tuple | set | frozenset):
            waiting += each
        elif isinstance(each, nn.Module) or type(each).__module__.partition(".")[0] == _PACKAGE:
            waiting += getattr(each, "__dict__", {}).values()
            slots = (name for kind in type(each).__mro__ for name in getattr(kind, "__slots__", ()))
            waiting += [getattr(each, name) for name in slots if hasattr(each, name)]
