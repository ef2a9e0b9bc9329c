"""The decoder that the fused families are made of: embedding, layers of attention and MLP, norm, head.

The forward pass is `DecoderModel.forward`, at the end, over layers such as `PreNormLayer`. Before them stands
`DecoderConfig`, its shape and numerics, and how `config.json` spells what the families have in common, then what treats
each token by itself: MLPs, gated or not, RMS norms (Zhang and Sennrich 2019, arXiv:1910.07467) and layer norms, alone
and fused with the residual's addition.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own habit
from torch import Tensor

from pagestream_engine.attention import Activation, Angles, HeadNorm, Operators, PagedAttention, Rotation, StepContext
from pagestream_engine.errors import InvariantViolation, ModelFileError, UnsupportedModel
from pagestream_engine.layers.linear import Linear
from pagestream_engine.layers.rope import ROPE_KINDS, Rope
from pagestream_engine.models.config import ConfigFile, ModelInfo
from pagestream_engine.models.model import Model
from pagestream_engine.models.weights import SCORES, Parameters, Turn
from pagestream_engine.parallel.stages import ONE_STAGE, Stage

_ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
}
SLIDING, FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True)
class LayerConfig:
    """What differs between the layers of one model."""

    rope: Rope | None
    """None: query and key are not rotated."""
    window: int | None = None
    """Most tokens that a query token sees, itself included; None: all."""
    is_sparse: bool = False
    """Whether its MLP is a mixture of experts."""


@dataclass(frozen=True)
class ExpertsConfig:
    """Shape of a mixture of experts."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    normalises: bool
    """Whether the weights of a token's experts are divided by their sum."""


@dataclass(frozen=True)
class DecoderConfig:
    """One model of a fused family."""

    info: ModelInfo
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    layers: tuple[LayerConfig, ...]
    activation: Activation
    scale: float
    """Factor of the products of query and key."""
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    soft_cap: float | None = None
    """Bound of the attention scores."""
    logit_soft_cap: float | None = None
    """Bound of the logits."""
    embedding_scale: float | None = None
    """Factor of the embeddings; None is 1."""
    logit_scale: float | None = None
    """Factor of the logits, before their bound; None is 1."""
    experts: ExpertsConfig | None = None
    slopes: tuple[float, ...] | None = None
    """Of each head: `AttentionSpec.slopes`."""
    rounds_slopes: bool = False
    """Likewise."""
    is_parallel: bool = False
    """Whether a layer's MLP takes what its attention takes, in place of what comes of that."""
    num_norms: int = 2
    """Of a layer; 1 for attention and MLP that are parallel and take the same."""
    normed_residual: bool = False
    """Whether what is added to the residual is added to its norm."""
    qk_norm: Literal["head", "all heads"] | None = None
    """What each layer norm of query, and of key, is of; None: there are none."""
    qkv_bound: float | None = None
    """Largest magnitude of elements of query, key and value; None: any."""
    padding_token: int = 0
    """Row that is 0 in a table of positions that is computed (XGLM)."""

    @property
    def query_size(self) -> int:
        """Columns of the query projection."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Columns of the key projection, and of the value projection."""
        return self.num_kv_heads * self.head_dim


def read_decoder(
    config: ConfigFile,
    info: ModelInfo,
    layers: tuple[LayerConfig, ...],
    *,
    activation: str = "hidden_act",
    scale: float | None = None,
    **differences: Any,
) -> DecoderConfig:
    """Read the fields that all fused families spell alike.

    Args:
        layers: one for each layer.
        activation: name of the field that has the MLP's activation.
        scale: of the attention; None is `head_dim ** -0.5`.
        differences: fields of `DecoderConfig` that are this family's own.

    Raises:
        ModelFileError: a field is missing or malformed.
        UnsupportedModel: the activation or the heads are none that this engine has.
    """
    num_heads, num_kv_heads = heads(config)
    head_dim = head_size(config)
    return DecoderConfig(
        info=info,
        hidden_size=config.whole("hidden_size"),
        intermediate_size=config.whole("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        norm_eps=config.number("rms_norm_eps", 1e-6),
        layers=layers,
        activation=_activation(config, activation),
        scale=head_dim**-0.5 if scale is None else scale,
        **{"tie_word_embeddings": config.flag("tie_word_embeddings", False), **differences},
    )


def heads(config: ConfigFile) -> tuple[int, int]:
    """Number of query heads and of KV heads."""
    num_heads = config.whole("num_attention_heads")
    num_kv_heads = config.whole("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise UnsupportedModel(
            f"config.json: num_attention_heads: given {num_heads}, expected a multiple of num_key_value_heads "
            f"({num_kv_heads})"
        )
    return num_heads, num_kv_heads


def head_size(config: ConfigFile) -> int:
    """Elements of a head."""
    return config.whole("head_dim", config.whole("hidden_size") // config.whole("num_attention_heads"))


def layer_types(config: ConfigFile, default: list[str]) -> list[str]:
    """One of SLIDING and FULL for each layer: the field `layer_types`, or the default."""
    types = config.get("layer_types", default)
    num_layers = config.whole("num_hidden_layers")
    if not isinstance(types, list) or len(types) != num_layers:
        raise ModelFileError(f"config.json: layer_types: given {types!r:.80}, expected a list of {num_layers} names")
    unknown = sorted({str(name) for name in types} - {SLIDING, FULL})
    if unknown:
        raise UnsupportedModel(f"config.json: layer_types: given {unknown[0]!r}, expected {SLIDING} or {FULL}")
    return types


def plain_rope(config: ConfigFile, *, theta: float = 10_000.0) -> Rope:
    """Read the one rotation of all layers. `transformers` 5 writes one `rope_parameters`, older versions `rope_theta`
    and `rope_scaling`.

    Args:
        theta: base where the file has none.
    """
    return read_rope(config, config.get("rope_parameters") or config.get("rope_scaling") or {}, theta=theta)


def read_rope(config: ConfigFile, given: Any, *, theta: float) -> Rope:
    """Read a rotation from its parameters; fields of the whole file stand in for those that are missing.

    Raises:
        ModelFileError: it is malformed.
        UnsupportedModel: `transformers` has no such scaling.
    """
    if not isinstance(given, Mapping):
        raise ModelFileError(f"config.json: rope scaling: given {given!r}, expected a JSON object")
    kind = given.get("rope_type", given.get("type", "default"))
    if kind not in ROPE_KINDS:
        raise UnsupportedModel(f"config.json: rope scaling: given {kind!r}, expected one of {', '.join(ROPE_KINDS)}")
    own = ConfigFile(given)
    context = config.whole("max_position_embeddings", 2048)
    scaling = {name: value for name, value in given.items() if name not in _ROPE_FIELDS}
    if kind in _RELATIVE_KINDS:
        original = config.get("original_max_position_embeddings") or given.get("original_max_position_embeddings")
        scaling["original_max_position_embeddings"] = original or context
    return Rope(
        head_dim=head_size(config),
        theta=own.number("rope_theta", config.number("rope_theta", theta)),
        kind=kind,
        max_position_embeddings=context,
        share=own.number("partial_rotary_factor", config.number("partial_rotary_factor", 1.0)),
        scaling=scaling,
    )


_ROPE_FIELDS = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
_RELATIVE_KINDS = ("llama3", "yarn", "longrope")
"""Scalings that are relative to `original_max_position_embeddings`."""


def _activation(config: ConfigFile, field: str) -> Activation:
    name = config.get(field, "silu")
    if name not in _ACTIVATIONS:
        raise UnsupportedModel(f"config.json: {field}: given {name!r}, expected one of {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


@dataclass(frozen=True, slots=True)
class DecoderStep:
    """What all layers of a step share."""

    context: StepContext
    angles: Mapping[Rotation, Angles]
    """Of each rotation of the model at the step's positions."""


HeadsNorm = Callable[[Tensor], Tensor]
"""(tokens, heads, head_dim) -> the same shape."""


Mlp = Callable[[Tensor], Tensor]
"""(tokens, hidden_size) -> (tokens, hidden_size), each token by itself."""


class GatedMlp:
    """down(activation(gate(x)) * up(x)) (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, gate_up: Linear, down: Linear, activation: Activation, operators: Operators) -> None:
        """`gate_up` has the rows of the gate, then those of the up projection."""
        self._gate_up = gate_up
        self._down = down
        self._activation = activation
        self._gated = operators.gated_by(activation)

    def __call__(self, x: Tensor) -> Tensor:
        if self._gate_up.fuses_gates:
            return self._down(self._gate_up.gated(x, self._activation))
        return self._down(self._gated(self._gate_up(x)))


class PlainMlp:
    """down(activation(up(x))): without a gate."""

    def __init__(self, up: Linear, down: Linear, activation: Activation, operators: Operators) -> None:
        self._up = up
        self._down = down
        self._activation = activation
        self._operators = operators

    def __call__(self, x: Tensor) -> Tensor:
        return self._down(self._operators.activate(self._up(x), self._activation))


class Norm(Protocol):
    """A norm of a layer's inputs."""

    def __call__(self, x: Tensor) -> Tensor:
        """(..., size) -> (..., size)."""
        ...

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """The norm of `x + residual`, and that sum; both arguments may be overwritten."""
        ...


class RmsNorm:
    """x / rms(x) * weight over the last dimension; the weight's dtype decides where it rounds: see `Operators`."""

    __slots__ = ("_operators", "eps", "weight")

    def __init__(self, weight: Tensor, eps: float, operators: Operators) -> None:
        self.weight = weight
        self.eps = eps
        self._operators = operators

    def __call__(self, x: Tensor) -> Tensor:
        """(..., size) -> (..., size)."""
        return self._operators.rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """The norm of `x + residual`, and that sum; both arguments may be overwritten."""
        return self._operators.add_rms_norm(x, residual, self.weight, self.eps)


class LayerNorm:
    """(x - mean(x)) / deviation(x) * weight + bias over the last dimension."""

    __slots__ = ("_bias", "_eps", "_operators", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None, eps: float, operators: Operators) -> None:
        self._weight = weight
        self._bias = bias
        self._eps = eps
        self._operators = operators

    def __call__(self, x: Tensor) -> Tensor:
        """(..., size) -> (..., size)."""
        return self._operators.layer_norm(x, self._weight, self._bias, self._eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """The norm of `x + residual`, and that sum; both arguments may be overwritten."""
        return self._operators.add_layer_norm(x, residual, self._weight, self._bias, self._eps)


@dataclass(frozen=True, slots=True)
class SelfAttention:
    """Projections, norms of query and key where the family has them, rotation, and attention over the cache."""

    qkv: Linear
    """Query, key and value projections as one, rows in this order."""
    output: Linear
    attention: PagedAttention
    rotation: Rotation | None
    norm: HeadNorm | None = None
    """Of query and key, where the family has one."""
    layer_norms: tuple[HeadsNorm, HeadsNorm] | None = None
    """Of query and key (tokens, heads, head_dim), where the family has such."""
    bound: float | None = None
    """Largest magnitude of what is projected."""

    def attend(self, x: Tensor, step: DecoderStep) -> Tensor:
        """(tokens, hidden_size) -> (tokens, query_size), before the output projection."""
        spec = self.attention.spec
        projected = self.qkv(x)
        if self.bound is not None:
            projected = projected.clamp_(-self.bound, self.bound)
        heads = projected.view(x.shape[0], -1, spec.head_dim)
        query, key, value = heads.tensor_split((spec.num_heads, spec.num_heads + spec.num_kv_heads), dim=1)
        if self.layer_norms is not None:
            query, key = self.layer_norms[0](query), self.layer_norms[1](key)
        angles = None if self.rotation is None else step.angles[self.rotation]
        return self.attention(query, key, value, step.context, angles, norm=self.norm)


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
    input_norm: Norm
    post_norm: Norm

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
class ParallelLayer:
    """Attention and MLP of the same tokens, added up (Wang and Komatsuzaki 2021, GPT-J)."""

    attention: SelfAttention
    mlp: Mlp
    input_norm: Norm
    mlp_norm: Norm | None
    """Before the MLP; None: it takes what attention takes."""

    def forward(
        self, x: Tensor | None, residual: Tensor, step: DecoderStep, wanted: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """As `DecoderLayer.forward`."""
        normed, residual = add_and_norm(self.input_norm, x, residual)
        x = self.attention.attend(normed, step)
        if wanted is not None:
            x, residual, normed = x[wanted], residual[wanted], normed[wanted]
        x = self.attention.output(x)
        return x.add_(self.mlp(normed if self.mlp_norm is None else self.mlp_norm(residual))), residual


@dataclass(frozen=True, slots=True)
class NormedResidualLayer:
    """Norms before attention and MLP, whose results are added to what they take (BLOOM, with
    `apply_residual_connection_post_layernorm`)."""

    attention: SelfAttention
    mlp: Mlp
    input_norm: Norm
    post_norm: Norm

    def forward(
        self, x: Tensor | None, residual: Tensor, step: DecoderStep, wanted: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """As `DecoderLayer.forward`."""
        residual, _ = add_and_norm(self.input_norm, x, residual)
        x = self.attention.attend(residual, step)
        if wanted is not None:
            x, residual = x[wanted], residual[wanted]
        residual, _ = self.post_norm.add(self.attention.output(x), residual)
        return self.mlp(residual), residual


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


@dataclass(frozen=True, slots=True)
class Entry:
    """What becomes of a token's embedding before the first layer."""

    positions: Tensor | None = None
    """(positions, hidden_size): added, by the token's place in its sequence."""
    norm: Norm | None = None

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        """(tokens, hidden_size) -> the same shape; `positions` is (tokens,) int64."""
        if self.positions is not None:
            x = x + F.embedding(positions, self.positions)
        return x if self.norm is None else self.norm(x)


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
        norm: Norm | None,
        operators: Operators,
        *,
        stage: Stage = ONE_STAGE,
        entry: Entry | None = None,
    ) -> None:
        """Take the parameters `embedding` and `head`, and the layers that a family has built.

        Args:
            parameters: loaded by the family's `WeightMap`.
            layers: of the stage by their indices, in order, at least one.
            norm: before the head; None for a stage that is not the last one.
            stage: that this process has.
            entry: of the first stage; None: embeddings go to the first layer as they are.
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
        self._entry = entry
        rotations = {layer.attention.rotation for layer in layers.values()}
        self._rotations = [rotation for rotation in rotations if rotation is not None]

    def forward(self, token_ids: Tensor, wanted: Tensor, context: StepContext) -> Tensor:
        step = DecoderStep(
            context,
            {rotation: self._operators.angles(rotation, context.positions) for rotation in self._rotations},
        )
        x, residual = self._begin(token_ids, context.positions)
        stage = self._stage
        for layer in self.layers:
            is_last = stage.is_last and layer is self.layers[-1]
            x, residual = layer.forward(x, residual, step, wanted if is_last and len(wanted) < len(token_ids) else None)
            if stage.notes_layers:
                stage.note_layer()
        if x is None:
            raise InvariantViolation(f"{self.info.architecture}: given no layers, expected at least one")
        if not stage.is_last:
            stage.send(torch.stack((x, residual)))
            return residual[:0]
        return x.add_(residual)

    def _begin(self, token_ids: Tensor, positions: Tensor) -> tuple[Tensor | None, Tensor]:
        """Return what the first layer gets."""
        if self._embedding is None:
            x, residual = self._stage.receive((2, len(token_ids), self.config.hidden_size))
            return x, residual
        residual = F.embedding(token_ids, self._embedding)
        if self._embedding_scale is not None:
            residual = residual * self._embedding_scale
        return None, residual if self._entry is None else self._entry(residual, positions)

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


def add_and_norm(norm: Norm, x: Tensor | None, residual: Tensor) -> tuple[Tensor, Tensor]:
    """The norm of `x + residual`, and that sum; None counts as zero."""
    return (norm(residual), residual) if x is None else norm.add(x, residual)
