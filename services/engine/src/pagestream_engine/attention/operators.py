"""The small steps between a model's matrix products: norms, gated activations and rotary embedding."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Rotation:
    """Rotary position embedding (Su et al. 2021, arXiv:2104.09864) of a head's first `rotary_dim` elements."""

    cos_sin: Tensor
    """(positions, rotary_dim) float32: cosines, then sines, of each position's `rotary_dim / 2` angles."""
    interleaved: bool = False
    """Whether neighbours 2i and 2i + 1 turn together (GPT-J), in place of i and i + rotary_dim / 2 (GPT-NeoX)."""
    rotary_dim: int = field(init=False)
    """Leading elements of a head that turn; the rest stay as they are."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "rotary_dim", self.cos_sin.shape[1])


@dataclass(frozen=True, slots=True, eq=False)
class Angles:
    """A rotation at a step's positions: made once a step for all layers that share the rotation."""

    rotation: Rotation
    positions: Tensor
    """(tokens,) int64."""
    cos: Tensor | None = None
    """(tokens, 1, rotary_dim) of the model's dtype, where the operators look angles up once a step."""
    sin: Tensor | None = None
    """As `cos`, negative for an element that takes its partner's share with a minus sign."""


@dataclass(frozen=True, slots=True, eq=False)
class HeadNorm:
    """RMS norms of each head's query and key, before their rotation."""

    query_weight: Tensor
    """(head_dim,): as `Operators.rms_norm` takes it."""
    key_weight: Tensor
    """As `query_weight`, of the same dtype."""
    eps: float


class Operators(ABC):
    """One backend's small steps. Results are rounded to the dtype of the arguments; sums are taken in float32."""

    @abstractmethod
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / rms(x) * weight over the last dimension (Zhang and Sennrich 2019, arXiv:1910.07467).

        With a weight of x's dtype, x / rms(x) is rounded before the product (Llama); with one in float32 the product
        alone is (Gemma).
        """

    @abstractmethod
    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """The norm of `x + residual`, and that sum; both arguments may be overwritten."""

    @abstractmethod
    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """(tokens, 2 * d) -> (tokens, d): silu of the first half times the second."""

    @abstractmethod
    def gelu_and_mul(self, gate_up: Tensor, *, tanh: bool) -> Tensor:
        """As `silu_and_mul` with gelu (Hendrycks and Gimpel 2016, arXiv:1606.08415), exact or by its tanh formula."""

    def angles(self, rotation: Rotation, positions: Tensor) -> Angles:
        """Return a rotation at a step's positions, (tokens,) int64."""
        return Angles(rotation, positions)

    @abstractmethod
    def rotate(self, query: Tensor, key: Tensor, angles: Angles) -> tuple[Tensor, Tensor]:
        """Rotate query (tokens, num_heads, head_dim) and key (tokens, num_kv_heads, head_dim); both may be
        overwritten.
        """
