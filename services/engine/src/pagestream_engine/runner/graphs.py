"""Steps of decodes that are recorded once for a number of sequences, and run again for any that fit.

A `Recorder` makes a function of tensors that stay in place repeatable without its launches: by CUDA graphs, or on a CPU
by running it anew.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from pagestream_engine.attention import Backend
from pagestream_engine.models.model import Model
from pagestream_engine.plan import Int32Array, Int64Array, StepPlan
from pagestream_engine.runner.batch import PersistentBatch

_FINE_UP_TO = 256


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Numbers of sequences that steps are recorded for, ascending: at most 7 too many up to 256, then at most 15."""
    sizes = [1, 2, 4, *range(8, min(max_num_seqs, _FINE_UP_TO), 8), *range(_FINE_UP_TO, max_num_seqs, 16)]
    return [*(size for size in sizes if size < max_num_seqs), max_num_seqs]


def can_record(model: Model, backend: Backend, recorder: Recorder) -> bool:
    """Whether a model's decodes can be recorded."""
    return model.can_be_recorded and (backend.attention.can_be_recorded or not recorder.is_strict)


class DecodeGraphs:
    """The layers of a model over the persistent batch, for each size of `graph_sizes`.

    A recorded step reads the rows and positions of its sequences, and all else by them, on the device. In the places
    beyond its sequences it has the batch's padding row, whose token goes to a block of its own and whose result is
    left where it is. The head and the sampler run after it, for the sequences alone: they depend on what these ask for.
    """

    def __init__(self, model: Model, backend: Backend, batch: PersistentBatch, sizes: list[int]) -> None:
        self._model = model
        self._backend = backend
        self._batch = batch
        self._sizes = sizes
        largest, device = sizes[-1], batch.device
        self._inputs = torch.zeros(2 * largest, dtype=torch.int64, device=device)
        """Rows, then positions, of as many sequences as the step that runs is recorded for."""
        self._places = torch.arange(largest, device=device)
        self._hidden: Tensor | None = None
        """(largest, hidden_size): results, of one step at a time."""
        self._replays: dict[int, Step] = {}

    def record(self, recorder: Recorder) -> None:
        """Record all sizes, the largest first; the batch's padding row computes."""
        recorder.begin()
        nothing = np.empty(0, np.int64)
        for size in reversed(self._sizes):
            self._write_inputs(nothing, nothing, size)
            if self._hidden is None:
                self._hidden = self._forward(size)
            self._replays[size] = recorder.record(partial(self._compute, size))

    def takes(self, plan: StepPlan) -> bool:
        """Whether a plan is one of decodes without drafts, few enough."""
        num_seqs = len(plan.rows)
        return not plan.num_prefills and 0 < num_seqs <= self._sizes[-1] and plan.num_tokens == num_seqs

    def run(self, rows: Int32Array, positions: Int64Array) -> tuple[Tensor, Tensor]:
        """Compute one token of each row.

        Args:
            rows: (rows,) of the batch.
            positions: (rows,) of their tokens.

        Returns:
            The rows on the device, (rows,) int64, and (rows, hidden_size): both until the next call.
        """
        if self._hidden is None:
            raise RuntimeError("run: nothing is recorded, expected a call of record before")
        count = len(rows)
        size = self._sizes[bisect_left(self._sizes, count)]
        self._write_inputs(rows, positions, size)
        self._replays[size]()
        return self._inputs[:count], self._hidden[:count]

    def _write_inputs(self, rows: Int32Array | Int64Array, positions: Int64Array, size: int) -> None:
        """Send them, padded to `size`, with what the batch has to edit."""
        numbers = np.zeros(2 * size, np.int64)
        # The padding row's token goes to a block beyond the pool's: no sequence reads it.
        numbers[:size] = self._batch.padding_row
        numbers[: len(rows)], numbers[size : size + len(rows)] = rows, positions
        (sent,) = self._batch.send([numbers])
        self._inputs[: 2 * size].copy_(sent)

    def _compute(self, size: int) -> None:
        if self._hidden is not None:
            # Copied out: all sizes share the graphs' memory pool, which the next replay overwrites.
            self._hidden[:size].copy_(self._forward(size))

    def _forward(self, size: int) -> Tensor:
        token_ids, batches = self._batch.decodes(self._inputs[:size], self._inputs[size : 2 * size])
        return self._model.forward(token_ids, self._places[:size], self._backend.prepare_decodes(batches))


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
