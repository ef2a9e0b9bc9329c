"""The decoder that the fused families are made of: embedding, layers of attention and MLP, norm, head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own habit
from torch import Tensor

from pagestream_engine.attention import Angles, HeadNorm, Operators, Rotation, StepContext
from pagestream_engine.errors import InvariantViolation
from pagestream_engine.layers.attention import PagedAttention
from pagestream_engine.layers.linear import Linear
from pagestream_engine.layers.mlp import Mlp, RmsNorm
from pagestream_engine.models.decoder_config import DecoderConfig
from pagestream_engine.models.model import Model
from pagestream_engine.models.weights import SCORES, Parameters, Turn
from pagestream_engine.parallel.stages import ONE_STAGE, Stage


@dataclass(frozen=True, slots=True)
class DecoderStep:
    """What all layers of a step share."""

    context: StepContext
    angles: Mapping[Rotation, Angles]
    """Of each rotation of the model at the step's positions."""


@dataclass(frozen=True, slots=True)
class SelfAttention:
    """Projections, norms of query and key where the family has them, rotation, and attention over the cache."""

    qkv: Linear
    """Query, key and value projections as one, rows in this order."""
    output: Linear
    attention: PagedAttention
    rotation: Rotation
    norm: HeadNorm | None = None
    """Of query and key, where the family has one."""

    def attend(self, x: Tensor, step: DecoderStep) -> Tensor:
        """(tokens, hidden_size) -> (tokens, query_size), before the output projection."""
        spec = self.attention.spec
        heads = self.qkv(x).view(x.shape[0], -1, spec.head_dim)
        query, key, value = heads.tensor_split((spec.num_heads, spec.num_heads + spec.num_kv_heads), dim=1)
        return self.attention(query, key, value, step.context, step.angles[self.rotation], norm=self.norm)


class DecoderLayer(Protocol):
    """Maps the residual stream; what it adds last is added by the next layer's first norm."""

    @property
    def attention(self) -> SelfAttention:
        """Its attention."""
        ...

    def forward(
        self, x: Tensor | None, residual: Tensor, step: DecoderStep, wanted: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Run one layer.

        Args:
            x: (tokens, hidden_size), to be added to the residual first; None for the first layer.
            residual: (tokens, hidden_size).
            wanted: (wanted,) int64, the packed tokens to go on with after attention; None: all. The others end with
                their keys and values.

        Returns:
            What is to be added to the residual, and the residual.
        """
        ...


@dataclass(frozen=True, slots=True)
class PreNormLayer:
    """Norms before attention and MLP (Llama)."""

    attention: SelfAttention
    mlp: Mlp
    input_norm: RmsNorm
    post_norm: RmsNorm

    def forward(
        self, x: Tensor | None, residual: Tensor, step: DecoderStep, wanted: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """As `DecoderLayer.forward`."""
        x, residual = add_and_norm(self.input_norm, x, residual)
        x = self.attention.attend(x, step)
        if wanted is not None:
            x, residual = x[wanted], residual[wanted]
        x, residual = self.post_norm.add(self.attention.output(x), residual)
        return self.mlp(x), residual


@dataclass(frozen=True, slots=True)
class SandwichNormLayer:
    """Norms before and after attention and MLP (Gemma 2)."""

    attention: SelfAttention
    mlp: Mlp
    input_norm: RmsNorm
    post_attention_norm: RmsNorm
    pre_mlp_norm: RmsNorm
    post_mlp_norm: RmsNorm

    def forward(
        self, x: Tensor | None, residual: Tensor, step: DecoderStep, wanted: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """As `DecoderLayer.forward`."""
        x, residual = add_and_norm(self.input_norm, x, residual)
        x = self.attention.attend(x, step)
        if wanted is not None:
            x, residual = x[wanted], residual[wanted]
        x = self.post_attention_norm(self.attention.output(x))
        x, residual = self.pre_mlp_norm.add(x, residual)
        return self.post_mlp_norm(self.mlp(x)), residual


@dataclass(frozen=True, slots=True)
class OffloadedLayer:
    """A layer whose weights are on the device for its turn alone."""

    layer: DecoderLayer
    turn: Turn

    @property
    def attention(self) -> SelfAttention:
        """The layer's."""
        return self.layer.attention

    def forward(
        self, x: Tensor | None, residual: Tensor, step: DecoderStep, wanted: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """As `DecoderLayer.forward`."""
        self.turn.begin()
        result = self.layer.forward(x, residual, step, wanted)
        self.turn.end()
        return result


class DecoderModel(Model):
    """The forward pass of the fused families. Weights come from the loader, small steps from the backend.

    A stage of a pipeline begins with what the stage before sends, the residual stream and what is to be added to it,
    and sends the same on: the next layer's norm adds them as if it were in this process, bit for bit.
    """

    computes_offloaded = True
    computes_stages = True

    def __init__(
        self,
        config: DecoderConfig,
        parameters: Parameters,
        layers: Mapping[int, DecoderLayer],
        norm: RmsNorm | None,
        operators: Operators,
        *,
        stage: Stage = ONE_STAGE,
    ) -> None:
        """Take the parameters `embedding` and `head`, and the layers that a family has built.

        Args:
            parameters: loaded by the family's `WeightMap`.
            layers: of the stage by their indices, in order, at least one.
            norm: before the head; None for a stage that is not the last one.
            stage: that this process has.
        """
        super().__init__(config.info)
        self.config = config
        self.can_be_deterministic = config.logit_soft_cap is None  # torch's tanh depends on an element's place
        # Which experts run depends on the tokens; and a layer that comes out of turn is copied once, not each time.
        self.can_be_recorded = config.experts is None and not parameters.offloaded
        self._scores = parameters.find_tensor(SCORES)
        self.pooled_size = config.hidden_size if self._scores is None else len(self._scores)
        self.layers: Sequence[DecoderLayer] = [
            OffloadedLayer(layer, parameters.offloaded[index]) if index in parameters.offloaded else layer
            for index, layer in layers.items()
        ]
        self._stage = stage
        self._norm = norm
        self._embedding = parameters.tensor("embedding") if stage.is_first else None
        scale = config.embedding_scale if stage.is_first else None
        self._embedding_scale = (
            None if scale is None else torch.tensor(scale, dtype=parameters.tensor("embedding").dtype)
        )
        self._head = parameters.linear("head") if stage.is_last else None
        self._parameters = parameters
        self._operators = operators
        self._rotations = {layer.attention.rotation for layer in layers.values()}

    def forward(self, token_ids: Tensor, wanted: Tensor, context: StepContext) -> Tensor:
        step = DecoderStep(
            context,
            {rotation: self._operators.angles(rotation, context.positions) for rotation in self._rotations},
        )
        x, residual = self._begin(token_ids)
        for layer in self.layers:
            is_last = self._stage.is_last and layer is self.layers[-1]
            x, residual = layer.forward(x, residual, step, wanted if is_last and len(wanted) < len(token_ids) else None)
            self._stage.note_layer()
        if x is None:
            raise InvariantViolation(f"{self.info.architecture}: given no layers, expected at least one")
        if not self._stage.is_last:
            self._stage.send(torch.stack((x, residual)))
            return residual[:0]
        return x.add_(residual)

    def _begin(self, token_ids: Tensor) -> tuple[Tensor | None, Tensor]:
        """Return what the first layer gets."""
        if self._embedding is None:
            x, residual = self._stage.receive((2, len(token_ids), self.config.hidden_size))
            return x, residual
        residual = F.embedding(token_ids, self._embedding)
        return None, residual if self._embedding_scale is None else residual * self._embedding_scale

    def logits(self, hidden: Tensor) -> Tensor:
        if self._head is None:
            raise InvariantViolation(f"stage {self._stage.index}: given a step to sample, expected the last stage")
        logits = self._head(self._normed(hidden))
        if self.config.logit_scale is not None:
            logits = logits * self.config.logit_scale
        cap = self.config.logit_soft_cap
        return logits if cap is None else (logits / cap).tanh_().mul_(cap)

    def states(self, hidden: Tensor) -> Tensor:
        states = self._normed(hidden)
        return states if self._scores is None else F.linear(states, self._scores)

    def _normed(self, hidden: Tensor) -> Tensor:
        if self._norm is None:
            raise InvariantViolation(f"stage {self._stage.index}: given states to end with, expected the last stage")
        return self._norm(hidden)

    def linears(self) -> Sequence[Linear]:
        return self._parameters.linears()

    def named_linears(self) -> Mapping[str, Linear]:
        return self._parameters.named_linears()

    def weight_bytes(self) -> int:
        return self._parameters.num_bytes()


def add_and_norm(norm: RmsNorm, x: Tensor | None, residual: Tensor) -> tuple[Tensor, Tensor]:
    """The norm of `x + residual`, and that sum; None counts as zero."""
    return (norm(residual), residual) if x is None else norm.add(x, residual)
