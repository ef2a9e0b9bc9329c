"""Records a function of tensors that stay in place, to run it again without its launches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

Step = Callable[[], None]
"""Reads tensors that stay in place, and writes to such."""


class Recorder(Protocol):
    """Makes a step repeatable."""

    @property
    def is_strict(self) -> bool:
        """Whether a step must launch the same kernels each time, and wait for none."""
        ...

    def begin(self) -> None:
        """Begin a set of steps. Those of the set before are gone: an engine that sleeps drops them, and records all
        steps anew when it wakes up."""
        ...

    def record(self, step: Step) -> Step:
        """Return what does as `step` does, with what is in its tensors then. All are recorded before any runs."""
        ...


class CudaGraphRecorder:
    """Records CUDA graphs that share one pool of memory for each set: only one of them runs at a time, and what one
    leaves in the pool is of no use to anyone.

    Record the largest step first: then the smaller ones find their memory in the pool.
    """

    is_strict = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        # The allocator frees a pool with its last graph: a handle that is used again may name a pool that is half gone.
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, step: Step) -> Step:
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            step()  # A recording permits neither compiling kernels nor a library's first call.
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads of the process may go on with CUDA meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            step()
        return graph.replay


class EagerRecorder:
    """Runs the step anew each time: on a CPU, where there is nothing to record."""

    is_strict = False

    def begin(self) -> None:
        """Do nothing: a step that runs anew keeps no memory."""

    def record(self, step: Step) -> Step:
        return step
