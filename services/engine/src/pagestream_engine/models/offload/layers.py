"""The offloaded layers of a loaded model: their pages in host memory, and the buffers that they take turns in."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pagestream_engine.models.offload.copier import Copier, Wait
from pagestream_engine.models.offload.plan import NUM_BUFFERS, OffloadPlan
from pagestream_engine.models.weights import LinearWeight


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
