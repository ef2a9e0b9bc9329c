"""How a layer's page gets from host memory to a buffer of the device beside what computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

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
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            done.record(self._stream)
        return lambda: torch.cuda.current_stream(self._device).wait_event(done)
