"""Weights in host memory: layers whose linears come to the device for their turn, tensors that leave it for a while.

`cpu_offload_gb` chooses the layers; each has a page in host memory, copied to one of the buffers that they take turns
in, beside what computes. Sleep moves tensors out and back in place: whoever holds one finds it again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from pagestream_engine.errors import ConfigError
from pagestream_engine.models.weights import LinearWeight, WeightMap
from pagestream_engine.transfers import slab_pages

NUM_BUFFERS = 2
"""On the device, of a page each: one layer computes from the one while the next one comes to the other."""
_ALIGNMENT = 256
"""Of a matrix in its page, in bytes: that of an allocation of torch's on a GPU."""
_LAYER = re.compile(r"(\d+)\.")

PageLayout = Mapping[str, int]
"""Parameter -> where it begins in its layer's page, in bytes."""


@dataclass(frozen=True)
class OffloadPlan:
    """Layers whose linears are in host memory, a page each. Their biases, norms and all else are on the device."""

    pages: Mapping[int, PageLayout]
    """By layer, ascending."""
    page_bytes: int
    """Of the largest of them, which is what each page takes."""
    slabs: tuple[int, ...]
    """Pages of each allocation of host memory, as `slab_pages` says."""
    weight_bytes: int
    """Of the linears in all pages."""

    @property
    def freed_bytes(self) -> int:
        """Bytes of the device's memory that the weights don't take."""
        return self.weight_bytes - NUM_BUFFERS * self.page_bytes


def plan_offload(weights: WeightMap, dtype: torch.dtype, max_bytes: int, *, pinned: bool) -> OffloadPlan:
    """Choose as many layers as fit into `max_bytes` of host memory, spread evenly over the model: between two of them
    others compute, while the next one is copied.

    Args:
        weights: a model's; a layer's are those whose names begin with its index and a dot.
        dtype: that they are loaded in.
        pinned: whether it is, so that torch rounds each allocation up.

    Raises:
        ConfigError: so few layers fit that the buffers on the device would take as much as is freed.
    """
    layers: dict[int, dict[str, LinearWeight]] = {}
    for name, weight in weights.items():
        if isinstance(weight, LinearWeight) and (found := _LAYER.match(name)):
            layers.setdefault(int(found[1]), {})[name] = weight
    sizes = {index: _lay_out(linears, dtype)[1] for index, linears in layers.items()}
    page_bytes = max(sizes.values(), default=0)
    slabs = slab_pages(max_bytes, page_bytes, pinned=pinned) if page_bytes else []
    count = min(len(sizes), sum(slabs))
    if count <= NUM_BUFFERS:
        expected = f"GiB of at least {NUM_BUFFERS + 1} layers of {page_bytes / 2**30:.3g} GiB, of which there are "
        hint = f"{NUM_BUFFERS} layers' memory stays on the device, to compute from"
        raise ConfigError("cpu_offload_gb", max_bytes / 2**30, expected + str(len(sizes)), hint)
    ordered = sorted(sizes)
    chosen = [ordered[(2 * place + 1) * len(ordered) // (2 * count)] for place in range(count)]
    return OffloadPlan(
        pages={index: _lay_out(layers[index], dtype)[0] for index in chosen},
        page_bytes=page_bytes,
        slabs=tuple(_for(count, slabs)),
        weight_bytes=sum(_num_bytes(weight, dtype) for index in chosen for weight in layers[index].values()),
    )


def _lay_out(linears: Mapping[str, LinearWeight], dtype: torch.dtype) -> tuple[dict[str, int], int]:
    """Return where each linear begins, and the bytes of all."""
    begins: dict[str, int] = {}
    end = 0
    for name, weight in linears.items():
        begins[name] = end
        end += -(-_num_bytes(weight, dtype) // _ALIGNMENT) * _ALIGNMENT
    return begins, end


def _num_bytes(weight: LinearWeight, dtype: torch.dtype) -> int:
    return weight.num_rows * weight.in_features * dtype.itemsize


def _for(count: int, slabs: list[int]) -> list[int]:
    """The first of these slabs that hold so many pages."""
    kept = []
    for slab in slabs:
        if count <= 0:
            break
        kept.append(min(slab, count))
        count -= slab
    return kept


@dataclass(frozen=True)
class OffloadTarget:
    """How weights are kept in host memory."""

    max_bytes: int
    """Most that they take there."""
    copier: Copier


class Buffer:
    """A page of the device's memory, in which some layers take turns, always in the same order.

    When a layer is done, the next one of its buffer is copied there while the layers of other buffers compute. A layer
    that comes out of turn, as after a step that failed, is copied when it comes.
    """

    def __init__(self, memory: Tensor, copier: Copier) -> None:
        """`memory` is (bytes of a page,) uint8."""
        self.memory = memory
        self.pages: list[Tensor] = []
        """Of its layers in host memory, in the order of their turns."""
        self._copier = copier
        self._held: int | None = None
        """Whose page it has, or gets."""
        self._wait: Wait | None = None

    def hold(self, turn: int) -> None:
        """Let what is launched from now on find a layer's page."""
        if self._held != turn:
            self._begin(turn)
        if self._wait is not None:
            self._wait()
            self._wait = None

    def release(self, turn: int) -> None:
        """Begin to copy the page of the layer after this one, which nothing reads that is launched from now on."""
        after = (turn + 1) % len(self.pages)
        if after != turn:
            self._begin(after)

    def _begin(self, turn: int) -> None:
        self._held = self._wait = None  # until it has begun: what is launched may raise
        self._wait = self._copier.begin(self.memory, self.pages[turn])
        self._held = turn


@dataclass(frozen=True, slots=True)
class OffloadedLayer:
    """A layer whose linears are views of a buffer, and have its weights between `begin` and `end` alone."""

    buffer: Buffer
    turn: int
    """Its place among the buffer's layers."""

    def begin(self) -> None:
        """Let what is launched from now on compute with the layer's weights."""
        self.buffer.hold(self.turn)

    def end(self) -> None:
        """Give the buffer to the next layer: all of this one is launched."""
        self.buffer.release(self.turn)


class OffloadedWeights:
    """The pages of a plan, the buffers, and the places of the linears in both."""

    def __init__(self, plan: OffloadPlan, dtype: torch.dtype, device: torch.device, copier: Copier) -> None:
        """Allocate both; what the pages hold is to be written to `host_matrix`."""
        self._dtype = dtype
        memory = (torch.zeros(plan.page_bytes, dtype=torch.uint8, device=device) for _ in range(NUM_BUFFERS))
        self._buffers = [Buffer(each, copier) for each in memory]
        self.layers: dict[int, OffloadedLayer] = {}
        """By their index in the model."""
        self._places: dict[str, tuple[OffloadedLayer, int]] = {}
        pages = [
            page
            for count in plan.slabs
            for page in torch.empty(
                count, plan.page_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda"
            ).unbind()
        ]
        for number, (index, begins) in enumerate(plan.pages.items()):
            buffer = self._buffers[number % NUM_BUFFERS]
            self.layers[index] = layer = OffloadedLayer(buffer, len(buffer.pages))
            buffer.pages.append(pages[number])
            self._places |= {name: (layer, begin) for name, begin in begins.items()}

    @property
    def num_device_bytes(self) -> int:
        """Bytes of the buffers."""
        return sum(buffer.memory.nbytes for buffer in self._buffers)

    @property
    def num_host_bytes(self) -> int:
        """Bytes of the pages."""
        return sum(page.nbytes for buffer in self._buffers for page in buffer.pages)

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def host_matrix(self, name: str, weight: LinearWeight) -> Tensor:
        """A linear's weight in its page, (out features, in features)."""
        layer, begin = self._places[name]
        return self._view(layer.buffer.pages[layer.turn], begin, weight)

    def device_matrix(self, name: str, weight: LinearWeight) -> Tensor:
        """The same in its layer's buffer."""
        layer, begin = self._places[name]
        return self._view(layer.buffer.memory, begin, weight)

    def _view(self, memory: Tensor, begin: int, weight: LinearWeight) -> Tensor:
        num_bytes = weight.num_rows * weight.in_features * self._dtype.itemsize
        return memory[begin : begin + num_bytes].view(self._dtype).view(weight.num_rows, weight.in_features)


Wait = Callable[[], None]
"""Lets what is launched from now on wait, on the device, until a copy is done."""


class Copier(Protocol):
    """Copies pages beside the computation."""

    def begin(self, target: Tensor, source: Tensor) -> Wait:
        """Copy once all that was launched before is done; what is launched after runs beside it.

        Args:
            target: (bytes,) of the device, which nothing reads before the result is called.
            source: (bytes,) of the host, pinned where there is a GPU; it never changes.
        """
        ...


class CudaCopier:
    """Copies on a stream of its own. The host waits for nothing."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def begin(self, target: Tensor, source: Tensor) -> Wait:
        # The layer that had the buffer is launched and may still compute: overwrite it only after that.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            done.record(self._stream)
        return lambda: torch.cuda.current_stream(self._device).wait_event(done)


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
