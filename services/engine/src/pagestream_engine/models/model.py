"""What the runner asks of a model, and how a model folder becomes one.

A `ModelSource` has what is known before the weights and how the layers attend; `load` makes the `Model` of it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from pagestream_engine.attention import AttentionSpec, Backend, StepContext
from pagestream_engine.errors import InvariantViolation
from pagestream_engine.layers.linear import Linear
from pagestream_engine.models.config import ModelInfo
from pagestream_engine.models.offload import OffloadTarget
from pagestream_engine.models.safetensors_file import Entry, read_folder
from pagestream_engine.models.weights import WeightMap
from pagestream_engine.parallel.ranks import ONE_RANK, Ranks
from pagestream_engine.parallel.stages import ONE_STAGE, Stage


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


@dataclass(frozen=True)
class Target:
    """What a model is loaded for."""

    dtype: torch.dtype
    device: torch.device
    max_model_len: int
    """Longest sequence, in tokens."""
    exact_linears: bool = False
    """Whether a row of a linear has to have the same bits in any batch."""
    by_triton: bool = False
    """Whether the model runs on the Triton kernels."""
    shared_bytes: int = 0
    """Most that files of weights have which all engines of the machine map; 0: weights are in this process's memory."""
    quantization: str | None = None
    """`ModelConfig.quantization`."""
    offload: OffloadTarget | None = None
    """How weights are kept in host memory; None: all are on the device."""
    ranks: Ranks = ONE_RANK
    """Among which each layer is divided."""
    stage: Stage = ONE_STAGE
    """Whose layers are loaded."""


class ModelSource(ABC):
    """A model folder whose configuration is read. `attention_specs`, then `load`, with one and the same target."""

    can_be_deterministic: bool = True
    """False where it is known before the weights are read that `Model.can_be_deterministic` will be."""
    routes_tokens: bool = False
    """Whether a router chooses experts for each token."""
    can_offload: bool = False
    """Whether it can keep weights in host memory: `Target.offload`."""
    plugin_digest: str = ""
    """Of the source files of a plugin that compute the model; empty where there are none."""

    weights: WeightMap | None = None
    """What fills the parameters of a model of a family; None for another, which takes no adapters."""

    def __init__(self, folder: Path, info: ModelInfo) -> None:
        self.folder = folder
        self.info = info

    @property
    def may_have_experts(self) -> bool:
        """False where it is known that there are none; code of transformers' own may have some."""
        return self.routes_tokens or self.weights is None

    def weight_bytes(self, target: Target) -> int:
        """Return the bytes that the weights need in memory while they are loaded, about.

        Raises:
            ModelFileError: a file is missing or malformed.
        """
        entries = self.tensors().values()
        return sum(prod(each.shape) * target.dtype.itemsize if each.is_plain else each.num_bytes for each in entries)

    def check_files(self) -> None:
        """Read the headers of the weights' files, and no tensor; compare them with the files' sizes.

        Raises:
            ModelError: a file is missing, malformed or cut off, or its tensors are not those of the configuration.
        """
        self.tensors()

    def tensors(self) -> dict[str, Entry]:
        """List the tensors in the folder's files, by name.

        Raises:
            ModelFileError: a file is missing or malformed.
        """
        return read_folder(self.folder)

    @property
    def pooled_size(self) -> int:
        """Numbers of a vector that is pooled from a prompt, by the configuration; 0: the model gives none."""
        return 0

    def weights_of_rank(self, target: Target) -> WeightMap | None:
        """Return what of `weights` is loaded for a target."""
        return self.weights

    @abstractmethod
    def attention_specs(self, target: Target) -> Sequence[AttentionSpec]:
        """Return how each layer with a cache attends.

        Raises:
            ModelError: the model can't be read, or can't run.
        """

    @abstractmethod
    def load(self, target: Target, backend: Backend) -> Model:
        """Load the weights, and build the model on a backend whose cache has the layers of `attention_specs`.

        Raises:
            ModelError: the weights are incomplete or malformed.
        """
