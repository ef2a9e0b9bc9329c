"""The quantised weight of a linear, of the projections that are its rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pagestream_engine.errors import ConfigError, UnsupportedModel
from pagestream_engine.layers.quantised import QuantisedWeight, stack
from pagestream_engine.models.quantised.scheme import Scheme
from pagestream_engine.models.quantised.tensors import TensorSource, is_quantised, read_projection
from pagestream_engine.models.weights import LinearWeight, Part


def read_quantised(
    source: TensorSource, scheme: Scheme, weight: LinearWeight, device: torch.device
) -> QuantisedWeight | None:
    """Read a linear from a quantised checkpoint; None where the checkpoint has it in floats.

    Raises:
        ConfigError: it can't be divided among so many ranks.
        WeightsError: a tensor is missing or mis-shaped.
        UnsupportedModel: its projections are stored in different ways.
    """
    names = [part.name for part in weight.parts]
    quantised = [is_quantised(source, name) for name in names]
    if not any(quantised):
        return None
    if not all(quantised):
        plain = names[quantised.index(False)]
        raise UnsupportedModel(
            f"{plain}: given floats beside quantised {names[quantised.index(True)]}, expected one form for projections "
            "of one input"
        )
    columns = weight.all_columns or weight.in_features
    shapes = {part.name: (part.all_rows or part.rows, columns) for part in weight.parts}
    whole = {name: read_projection(source, scheme, name, shape) for name, shape in shapes.items()}
    parts = [_part_of(whole[part.name], part, weight).to(device) for part in weight.parts]
    _check_alike(names, parts)
    return stack(parts)


def _part_of(projection: QuantisedWeight, part: Part, weight: LinearWeight) -> QuantisedWeight:
    """Return what a rank has of a projection."""
    found = projection.cut(slice(part.first_row, part.first_row + part.rows), weight.columns)
    if found is None:
        num_ranks = projection.shape[1] // weight.in_features
        hint = f"groups of {projection.group_size} inputs would be cut into odd numbers of them"
        if projection.order is not None:
            hint = "its inputs are in an order of their own (g_idx, of desc_act), which has no parts"
        raise ConfigError("tensor_parallel_size", num_ranks, f"1 for {part.name}", hint)
    return found


def _check_alike(names: Sequence[str], parts: Sequence[QuantisedWeight]) -> None:
    first = parts[0]
    for name, part in zip(names, parts, strict=True):
        if part.storage != first.storage or part.group_size != first.group_size or not _equal(part, first):
            raise UnsupportedModel(
                f"{name}: given another form, group size or order of inputs (g_idx) than {names[0]}, expected the same "
                "for projections of one input"
            )


def _equal(part: QuantisedWeight, other: QuantisedWeight) -> bool:
    if part.order is None or other.order is None:
        return part.order is other.order
    return torch.equal(part.order, other.order)
