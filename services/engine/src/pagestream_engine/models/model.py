"""What the runner asks of a model, whatever its family."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

from pagestream_engine.attention import StepContext
from pagestream_engine.layers.linear import Linear
from pagestream_engine.layers.row_counts import RowCounts
from pagestream_engine.models.config import ModelInfo


class Model(ABC):
    """A loaded model: computes packed tokens of many sequences, which meet in attention alone."""

    can_be_deterministic: bool = True
    """Whether all it computes beside linears, operators and attention gives a token the same bits in any batch."""

    forward_gives_logits: bool = False
    """Whether what `forward` returns for a token is as wide as the vocabulary."""

    def __init__(self, info: ModelInfo) -> None:
        self.info = info
        self._row_counts: dict[tuple[object, ...], RowCounts] = {}

    @abstractmethod
    def forward(self, token_ids: Tensor, wanted: Tensor, context: StepContext) -> Tensor:
        """Run all layers.

        Args:
            token_ids: (tokens,) int64, packed.
            wanted: (wanted,) int64, the packed tokens whose result is wanted, in order.
            context: `Backend.prepare_step` of this step.

        Returns:
            (wanted, hidden_size), what `logits` takes.
        """

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """(wanted, hidden_size) -> (wanted, vocab_size)."""

    @abstractmethod
    def linears(self) -> Sequence[Linear]:
        """All linears, the head last."""

    @abstractmethod
    def weight_bytes(self) -> int:
        """Bytes of all weights."""

    def probe_row_counts(self) -> list[RowCounts]:
        """Try, for each shape of linear, which row counts agree bit for bit; see `use_row_counts`."""
        found: dict[tuple[object, ...], RowCounts] = {}
        for linear in self.linears():
            if linear.kernel not in found:
                found[linear.kernel] = RowCounts(linear.product, linear.method.shape[1], linear.method.dtype)
        self._row_counts = found
        return list(found.values())

    def use_row_counts(self) -> None:
        """Make every linear give a row the same bits in any batch, after `probe_row_counts`."""
        for linear in self.linears():
            linear.row_counts = self._row_counts[linear.kernel]
