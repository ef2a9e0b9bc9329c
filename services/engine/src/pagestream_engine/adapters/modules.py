"""Which modules of a model an adapter may have matrices for, and which rows of which linear each one is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pagestream_engine.models.weights import LinearWeight, WeightMap

_EXCLUDED = frozenset({"head", "router", "experts"})
"""Linears without adapters, by a word of the parameter's name: a token's experts get rows of their own choice, and the
head computes rows that were picked from the step's."""


@dataclass(frozen=True, slots=True)
class ModuleCut:
    """What a rank has of a module that is divided, or is on another rank."""

    rows: tuple[tuple[int, int], ...]
    """First and end of ranges of the module's rows, in order."""
    first_column: int
    shape: tuple[int, int]
    """Of the whole module: output and input features."""


@dataclass(frozen=True, slots=True)
class ModuleSlice:
    """A module of the checkpoint: rows of a linear, which may hold several (query, key and value; gate and up)."""

    parameter: str
    """The linear's name among the model's parameters."""
    part: int
    """The module's place among those of the linear."""
    first_row: int
    """Of the linear's output features."""
    rows: int
    """Output features; 0 for a module of another stage."""
    in_features: int
    cut: ModuleCut | None = None
    """None for a whole module."""

    @property
    def shape(self) -> tuple[int, int]:
        """Output and input features of the whole module."""
        return (self.rows, self.in_features) if self.cut is None else self.cut.shape

    def cut_a(self, a: Tensor) -> Tensor:
        """(rank, in features of the whole module) -> (rank, in features), contiguous."""
        if self.cut is None:
            return a
        return a[:, self.cut.first_column : self.cut.first_column + self.in_features].contiguous()

    def cut_b(self, b: Tensor) -> Tensor:
        """(out features of the whole module, rank) -> (rows, rank)."""
        return b if self.cut is None else torch.cat([b[first:end] for first, end in self.cut.rows])


def adaptable_modules(weights: WeightMap, of_rank: WeightMap | None = None) -> Mapping[str, ModuleSlice]:
    """Return the modules of a model that adapters may change, by their names in the checkpoint.

    Args:
        of_rank: what a rank has of them; None: all.
    """
    modules: dict[str, ModuleSlice] = {}
    for parameter, weight in weights.items():
        if not isinstance(weight, LinearWeight) or _EXCLUDED & set(parameter.split(".")):
            continue
        own = weight if of_rank is None else of_rank.get(parameter)
        first = 0
        for place, part in enumerate(weight.parts):
            module = ModuleSlice(parameter, place, first, part.rows, weight.in_features)
            if own is not weight:
                module = _cut(module, part.name, own if isinstance(own, LinearWeight) else None)
            modules[part.name] = module
            first += module.rows
    return modules


def _cut(module: ModuleSlice, name: str, own: LinearWeight | None) -> ModuleSlice:
    """Return what a rank's linear has of a module; None: nothing."""
    if own is None:
        return replace(module, rows=0, cut=ModuleCut((), 0, module.shape))
    parts = [part for part in own.parts if part.name == name]
    rows = tuple((part.first_row, part.first_row + part.rows) for part in parts)
    cut = ModuleCut(rows, own.first_column, module.shape)
    return replace(module, rows=sum(part.rows for part in parts), in_features=own.in_features, cut=cut)
