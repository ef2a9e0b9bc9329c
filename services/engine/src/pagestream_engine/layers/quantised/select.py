"""Which method multiplies with a quantised weight where, and its parts as tensors that may lie anywhere."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pagestream_engine.layers.linear_methods import LinearMethod
from pagestream_engine.layers.quantised.methods import (
    NativeQuantisedMethod,
    TorchQuantisedMethod,
    TritonQuantisedMethod,
)
from pagestream_engine.layers.quantised.native import Layout, quantised_linears
from pagestream_engine.layers.quantised.weight import QuantisedWeight, Storage

PANELS, _LAYOUT, _ORDER = "", ".layout", ".order"


def choose_quantised_method(
    weight: QuantisedWeight, dtype: torch.dtype, *, exact: bool, by_triton: bool = False
) -> LinearMethod:
    """Choose the method that computes fastest with a weight where it lies.

    Args:
        weight: read from a checkpoint, or made of a plain one.
        exact: whether a row has to have the same bits in any batch. The kernels' rows have, asked for or not.
        by_triton: whether the model runs on the Triton kernels.
    """
    if by_triton and TritonQuantisedMethod.takes(weight):
        return TritonQuantisedMethod(weight, dtype)
    kernels = None if by_triton or weight.values.device.type != "cpu" else quantised_linears(dtype)
    if kernels is not None:
        return NativeQuantisedMethod.of(weight, dtype, kernels)
    return TorchQuantisedMethod(weight, dtype, exact=exact)


def parts_of(method: LinearMethod) -> dict[str, Tensor]:
    """Return a method's weight as named tensors, of which `from_parts` makes it again; none where it has no panels."""
    if not isinstance(method, NativeQuantisedMethod):
        return {}
    layout = torch.tensor([method.layout.storage, method.layout.group_size], dtype=torch.int32)
    parts = {PANELS: method.packed, _LAYOUT: layout}
    return parts if method.order is None else {**parts, _ORDER: method.order.int()}


def from_parts(
    parts: Callable[[str], Tensor | None], shape: tuple[int, int], dtype: torch.dtype
) -> LinearMethod | None:
    """Make a method of what `parts_of` has returned of one for the same library of kernels.

    Args:
        parts: returns the tensor of a name, None where there is none.
        shape: (out features, in features).

    Returns:
        None where these are not the parts of a quantised weight.
    """
    packed, layout, order = parts(PANELS), parts(_LAYOUT), parts(_ORDER)
    kernels = quantised_linears(dtype)
    if packed is None or layout is None or kernels is None:
        return None
    storage, group_size = layout.tolist()
    indices = None if order is None else order.long()
    return NativeQuantisedMethod(Layout(shape, Storage(storage), group_size), dtype, kernels, packed, indices)
