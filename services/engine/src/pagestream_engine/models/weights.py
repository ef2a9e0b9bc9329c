"""Declared weight mappings: which tensors of a checkpoint, or which rows of them, make up each parameter of a model.

A family declares its parameters as data, and the loader alone reads files: weights that are stored in another way
(quantised, sharded, with adapters) arrive through the same declarations.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from torch import Tensor

from pagestream_engine.errors import DOWNLOAD_AGAIN, WeightsError
from pagestream_engine.layers.linear import Linear

BIAS = "_bias"
"""What ends the name of a parameter that is the bias of the one before."""
EXPERT = ".experts."
"""In the names of parameters of one expert among several."""
SCORES = "scores"
"""Name of the parameter of a model that classifies: (labels, hidden_size)."""


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of a parameter that one tensor of the checkpoint fills."""

    name: str
    """Of the tensor in the checkpoint; of a linear, without `.weight` and `.bias`."""
    rows: int
    """How many it fills."""
    first_row: int = 0
    """Of the tensor: the first one that is read."""
    all_rows: int | None = None
    """Rows of the tensor; None: those that are read."""


@dataclass(frozen=True, slots=True)
class TensorWeight:
    """A parameter that stays a tensor: parts stacked along the first dimension."""

    parts: tuple[Part, ...]
    trailing: tuple[int, ...] = ()
    """The other dimensions, the same for all parts."""

    @classmethod
    def of(cls, name: str, *shape: int) -> TensorWeight:
        """Declare one whole tensor."""
        return cls((Part(name, shape[0]),), shape[1:])


@dataclass(frozen=True, slots=True)
class LinearWeight:
    """The weight and bias of a `Linear`; several projections of one input are one linear, their rows stacked."""

    parts: tuple[Part, ...]
    in_features: int
    """Columns that are read of each tensor."""
    bias: bool = False
    is_sensitive: bool = False
    """Whether it keeps the model's dtype where the others are quantised: a router, whose choices are all or nothing."""
    first_column: int = 0
    """Of each tensor: the first one that is read."""
    all_columns: int | None = None
    """Columns of each tensor; None: those that are read."""

    @property
    def num_rows(self) -> int:
        """Out features of all parts."""
        return sum(part.rows for part in self.parts)

    @property
    def columns(self) -> slice:
        """Columns that are read of each tensor."""
        return slice(self.first_column, self.first_column + self.in_features)

    def with_all_columns(self) -> LinearWeight:
        """Return the same rows, undivided."""
        return replace(self, in_features=self.all_columns or self.in_features, first_column=0, all_columns=None)

    @classmethod
    def of(cls, name: str, out_features: int, in_features: int, *, bias: bool = False) -> LinearWeight:
        """Declare one whole projection."""
        return cls((Part(name, out_features),), in_features, bias)


@dataclass(frozen=True, slots=True)
class TiedWeight:
    """A linear whose weight is a tensor that the model also uses as it is, such as a head that is the embedding."""

    to: str
    """Parameter that holds the weight; declared before this one."""
    rows: tuple[int, int] | None = None
    """First and end of its rows that are the linear's; None: all."""

    def of(self, matrix: Tensor) -> Tensor:
        """Return the linear's rows of the parameter."""
        return matrix if self.rows is None else matrix[slice(*self.rows)]


Weight = TensorWeight | LinearWeight | TiedWeight
WeightMap = Mapping[str, Weight]
"""Parameter -> what fills it, in the order of loading."""


def check_shapes(weights: WeightMap, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Check that a checkpoint has the tensors that parameters are declared to consist of.

    Args:
        shapes: of the checkpoint's tensors, by name.

    Raises:
        WeightsError: one is missing, or has another shape.
    """
    for name, expected in _tensors(weights):
        found = shapes.get(name)
        if found is None:
            raise WeightsError(f"{name}: missing, expected among the weights with shape {expected}; {DOWNLOAD_AGAIN}")
        if found != expected:
            raise WeightsError(f"{name}: given shape {found}, expected {expected} by config.json")


def _tensors(weights: WeightMap) -> Iterator[tuple[str, tuple[int, ...]]]:
    for weight in weights.values():
        match weight:
            case TensorWeight():
                for part in weight.parts:
                    yield part.name, (part.all_rows or part.rows, *weight.trailing)
            case LinearWeight():
                for part in weight.parts:
                    rows = part.all_rows or part.rows
                    yield f"{part.name}.weight", (rows, weight.all_columns or weight.in_features)
                    if weight.bias:
                        yield f"{part.name}.bias", (rows,)


class Turn(Protocol):
    """Of a layer whose linears have their weights between `begin` and `end` alone."""

    def begin(self) -> None:
        """Let what is launched from now on compute with them."""
        ...

    def end(self) -> None:
        """Note that all of the layer is launched."""
        ...


class Parameters:
    """A model's loaded parameters by the names of its `WeightMap`."""

    def __init__(self, offloaded: Mapping[int, Turn] | None = None, num_buffer_bytes: int = 0) -> None:
        """Args:
        offloaded: turns of the layers whose linears are in host memory, by their index.
        num_buffer_bytes: that those take on the device.
        """
        self.offloaded = {} if offloaded is None else offloaded
        """Turns of the layers that have any."""
        self._tensors: dict[str, Tensor] = {}
        self._linears: dict[str, Linear] = {}
        self._num_bytes = num_buffer_bytes

    def add_tensor(self, name: str, tensor: Tensor) -> None:
        """Add a parameter that is a tensor."""
        self._tensors[name] = tensor
        self._num_bytes += tensor.nbytes

    def add_linear(self, name: str, linear: Linear, *, is_shared: bool = False) -> None:
        """Add a parameter that is a linear. A weight that is shared, with a tensor or with other layers' in a buffer,
        is counted there."""
        self._linears[name] = linear
        self._num_bytes += linear.num_bytes - (linear.method.num_bytes if is_shared else 0)

    def replace_linear(self, name: str, linear: Linear) -> None:
        """Put another linear, with the same weight, in the place of a declared one."""
        self._linears[name] = linear

    def drop_linear(self, name: str) -> Linear:
        """Return a linear, and hold it no longer."""
        return self._linears.pop(name)

    def tensor(self, name: str) -> Tensor:
        """Return a declared tensor."""
        return _get(self._tensors, name, "tensor")

    def find_tensor(self, name: str) -> Tensor | None:
        """Return a tensor, None where none is declared by the name."""
        return self._tensors.get(name)

    def linear(self, name: str) -> Linear:
        """Return a declared linear."""
        return _get(self._linears, name, "linear")

    def named_linears(self) -> Mapping[str, Linear]:
        """All linears by their names."""
        return self._linears

    def linears(self) -> list[Linear]:
        """All linears, in the order of the declaration."""
        return list(self._linears.values())

    def num_bytes(self) -> int:
        """Bytes of all parameters on the device, as the checkpoint's layout has them."""
        return self._num_bytes


_T = TypeVar("_T")


def _get(found: Mapping[str, _T], name: str, kind: str) -> _T:
    try:
        return found[name]
    except KeyError:
        raise WeightsError(f"{name}: no such {kind} is declared, expected one of {', '.join(found)}") from None
