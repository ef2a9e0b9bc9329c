"""What a stage is: one change to the logits of the rows whose requests ask for it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagestream_engine.sampler.stages.slots import RowSlots
from pagestream_engine.sampling_params import SamplingParams

TokenIds = Sequence[int] | NDArray[np.int32] | NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class NewRow:
    """What is known of a sequence when it gets a row."""

    params: SamplingParams
    end_token_ids: Collection[int]
    """Tokens that end it: not to be chosen before `min_tokens`."""
    prompt_token_ids: TokenIds
    output_token_ids: TokenIds
    """What it has generated already."""


@dataclass(frozen=True, slots=True)
class StageRows:
    """The rows of one step that use a stage."""

    copies: Tensor
    """(rows,) int64: their rows among the copied logits, which the stages change."""
    samples: Tensor
    """(rows,) int64: their places among all rows that are sampled."""
    slots: Tensor
    """(rows,) int64: where the stage keeps their state, on its device."""
    host_slots: NDArray[np.int64]
    """`slots` on the host."""


class LogitsStage(ABC):
    """Base of the stages. A row that does not use one takes neither memory nor time of it.

    Everything that a stage computes in `apply` and `advance` has shapes that the host knows without reading from the
    device: no call waits for it.
    """

    bans_by: ClassVar[str | None] = None
    """The field of a request by which it bans tokens; None where it bans none."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self.slots = RowSlots(max_rows)

    def add(self, row: int, new: NewRow) -> None:
        """Take the state of a new row, if its request uses this stage."""
        if self._is_used_by(new):
            self._fill(self.slots.take(row), new)

    def remove(self, row: int) -> None:
        """Forget a row; one that does not use the stage is ignored."""
        self.slots.free(row)

    @abstractmethod
    def _is_used_by(self, new: NewRow) -> bool:
        """Whether the stage can change this row's logits."""

    @abstractmethod
    def _fill(self, slot: int, new: NewRow) -> None:
        """Write a new row's state to a slot, whatever an earlier row has left there."""

    @abstractmethod
    def apply(self, logits: Tensor, rows: StageRows) -> None:
        """Change `logits` (rows, vocab_size) float32, contiguous, in place."""

    def advance(self, token_ids: Tensor, rows: StageRows) -> None:  # noqa: B027 - most stages keep no count
        """Take the tokens (rows,) int64 that were sampled for `rows`."""
