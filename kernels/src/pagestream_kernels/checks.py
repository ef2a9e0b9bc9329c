"""Argument checks: each raises KernelArgumentError with what was given and what was expected."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pagestream_kernels.errors import KernelArgumentError

FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
INDEX_DTYPES = (torch.int32, torch.int64)


def check_tensor(name: str, value: object) -> Tensor:
    """A tensor, or an error that says what came instead."""
    if not isinstance(value, Tensor):
        raise KernelArgumentError(f"{name}: expected a torch.Tensor, got {type(value).__name__}")
    return value


def check_dtype(name: str, tensor: Tensor, expected: Sequence[torch.dtype]) -> None:
    """The tensor's dtype is one of `expected`."""
    if check_tensor(name, tensor).dtype not in expected:
        names = " or ".join(str(dtype) for dtype in expected)
        raise KernelArgumentError(f"{name}: expected dtype {names}, got {tensor.dtype}")


def check_shape(name: str, tensor: Tensor, expected: Sequence[int | None], *, meaning: str) -> None:
    """The tensor's shape equals `expected`, where None stands for any size; `meaning` names the dimensions."""
    shape = tuple(check_tensor(name, tensor).shape)
    fits = len(shape) == len(expected) and all(
        want is None or have == want for have, want in zip(shape, expected, strict=True)
    )
    if not fits:
        wanted = "(" + ", ".join("*" if want is None else str(want) for want in expected) + ")"
        raise KernelArgumentError(f"{name}: expected shape {wanted} = {meaning}, got {shape}")


def check_last_stride(name: str, tensor: Tensor) -> None:
    """Neighbours in the last dimension are neighbours in memory."""
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise KernelArgumentError(f"{name}: expected stride 1 in the last dimension, got strides {tensor.stride()}")


def check_same_device(first: tuple[str, Tensor], *others: tuple[str, Tensor | None]) -> None:
    """All tensors are on the device of the first."""
    for name, tensor in others:
        if tensor is not None and tensor.device != first[1].device:
            raise KernelArgumentError(f"{name}: expected device {first[1].device} (of {first[0]}), got {tensor.device}")


def check_output(name: str, out: Tensor | None, like: Tensor, shape: Sequence[int]) -> Tensor:
    """`out` if it fits, a new tensor if it is None."""
    if out is None:
        return torch.empty(tuple(shape), dtype=like.dtype, device=like.device)
    check_shape(name, out, tuple(shape), meaning="the shape of the result")
    check_dtype(name, out, (like.dtype,))
    check_last_stride(name, out)
    return out
