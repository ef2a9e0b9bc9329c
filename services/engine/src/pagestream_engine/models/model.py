"""What the runner asks of a model, whatever its family."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from torch import Tensor

from pagestream_engine.attention import StepContext
from pagestream_engine.errors import InvariantViolation
from pagestream_engine.layers.linear import Linear
from pagestream_engine.models.config import ModelInfo


class Model(ABC):
    """A loaded model: computes packed tokens of many sequences, which meet in attention alone."""

    can_be_deterministic: bool = True
    """Whether all it computes beside linears, operators and attention gives a token the same bits in any batch."""

    can_be_recorded: bool = False
    """Whether `forward` launches the same operations for any tokens and waits for none of them: what recording a CUDA
    graph takes. Modelling code that is not ours may do otherwise."""

    computes_offloaded: bool = False
    """Whether its layers begin and end the turns of `Parameters.offloaded`."""

    computes_stages: bool = False
    """Whether it can be of some layers alone: `BuildContext.stage`."""

    forward_gives_logits: bool = False
    """Whether `forward` returns logits already, which `logits` takes and returns: as wide as the vocabulary."""

    pooled_size: int = 0
    """Numbers that `states` has for each token; 0: there is no such seam."""

    def __init__(self, info: ModelInfo) -> None:
        self.info = info

    @abstractmethod
    def forward(self, token_ids: Tensor, wanted: Tensor, context: StepContext) -> Tensor:
        """Run all layers.

        Args:
            token_ids: (tokens,) int64, packed.
            wanted: (wanted,) int64, the packed tokens whose result is wanted, in order.
            context: `Backend.prepare_step` of this step.

        Returns:
            (wanted, hidden_size), what `logits` takes; (wanted, vocab_size) where `forward_gives_logits`. A stage that
            is not the last one sends its result on, and returns none of it: (0, hidden_size).
        """

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """What `forward` returned -> (wanted, vocab_size)."""

    def states(self, hidden: Tensor) -> Tensor:
        """What `forward` returned -> (wanted, pooled_size): the hidden states after the last norm, as `transformers`
        gives them; of a model that classifies its scores of labels.

        Raises:
            InvariantViolation: `pooled_size` is 0.
        """
        raise InvariantViolation("pooling: given a model without hidden states, expected that it was refused")

    @abstractmethod
    def linears(self) -> Sequence[Linear]:
        """All linears, the head last."""

    def named_linears(self) -> Mapping[str, Linear]:
        """The linears of a family's `WeightMap`, by their names there; none where the model has no such map."""
        return {}

    @abstractmethod
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
