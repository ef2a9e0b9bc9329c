"""Which modules of a model an adapter may have matrices for, and which rows of which linear each one is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pagestream_engine.models.weights import LinearWeight, WeightMap

_EXCLUDED = frozenset({"head", "router", "experts"})
"""Linears without adapters, by a word of the parameter's name: a token's experts get rows of their own choice, and the
head computes rows that were picked from the step's."""


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
    """Output features."""
    in_features: int


def adaptable_modules(weights: WeightMap) -> Mapping[str, ModuleSlice]:
    """Return the modules of a model that adapters may change, by their names in the checkpoint."""
    modules: dict[str, ModuleSlice] = {}
    for parameter, weight in weights.items():
        if not isinstance(weight, LinearWeight) or _EXCLUDED & set(parameter.split(".")):
            continue
        first = 0
        for place, part in enumerate(weight.parts):
            modules[part.name] = ModuleSlice(parameter, place, first, part.rows, weight.in_features)
            first += part.rows
    return modules
