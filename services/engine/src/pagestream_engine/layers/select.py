"""Which linear method runs where."""

from __future__ import annotations

import torch
from torch import Tensor

from pagestream_engine.layers.exact_methods import NativeMethod, RowByRowMethod, TritonMethod
from pagestream_engine.layers.linear_methods import LinearMethod, OnednnMethod, PackedMethod, PlainMethod, runs_onednn
from pagestream_engine.layers.native.library import native_linears


def choose_method(
    weight: Tensor, *, exact: bool, by_triton: bool = False, may_copy: bool = True, packed: Tensor | None = None
) -> LinearMethod:
    """Choose the method that computes fastest with a weight where it lies.

    Args:
        weight: (out features, in features).
        exact: whether a row has to have the same bits in any batch.
        by_triton: whether the Triton kernel sees to that: on a GPU, and where the interpreter plays one.
        may_copy: whether another layout may be made of it. A weight that something else uses too would then be in
            memory twice.
        packed: what `panels_of` has returned of a method of the same weight, which then may be on the meta device.
    """
    if exact and by_triton:
        return TritonMethod(weight)
    if exact:
        kernels = native_linears(weight.dtype)
        return (
            RowByRowMethod(weight) if kernels is None else NativeMethod(weight, kernels, copies=may_copy, packed=packed)
        )
    if not runs_onednn(weight.device.type, weight.dtype):
        return PlainMethod(weight)
    return PackedMethod(weight) if may_copy else OnednnMethod(weight)


def panels_of(method: LinearMethod) -> Tensor | None:
    """Return the weight of a method in a layout of its own, as memory that may lie anywhere; None where it has none."""
    return method.packed if isinstance(method, NativeMethod) else None


def kernel_build(dtype: torch.dtype) -> str:
    """Return the name of the library that decides the layout of exact linears of a dtype; empty without one."""
    kernels = native_linears(dtype)
    return "" if kernels is None else kernels.name


def lays_out_anew(device_type: str, dtype: torch.dtype, *, exact: bool, by_triton: bool = False) -> bool:
    """Return whether `choose_method` copies a weight that it may copy."""
    if exact and by_triton:
        return False
    return native_linears(dtype) is not None if exact else runs_onednn(device_type, dtype)
