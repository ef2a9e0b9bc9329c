"""Steps of decodes that are recorded once for a number of sequences, and run again for any that fit."""

from __future__ import annotations

from bisect import bisect_left
from functools import partial

import numpy as np
import torch
from torch import Tensor

from pagestream_engine.attention import Backend
from pagestream_engine.models.model import Model
from pagestream_engine.plan import Int32Array, Int64Array, StepPlan
from pagestream_engine.runner.persistent_batch import PersistentBatch
from pagestream_engine.runner.recorder import Recorder, Step

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
