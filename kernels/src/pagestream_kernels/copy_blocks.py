"""Copies of whole cache blocks in all layers, in one launch: copy on write, and swapping between pools."""

from __future__ import annotations

from functools import lru_cache
from math import gcd

import torch
from torch import Tensor

from pagestream_kernels.checks import INDEX_DTYPES, check_dtype, check_last_stride, check_same_device, check_shape
from pagestream_kernels.errors import KernelArgumentError
from pagestream_kernels.runtime import Variant, cdiv, kernel, pointer_to, require_launchable, tl

CHUNK = 8192  # bytes that a program copies; 128 threads with four loads of 16 each
WORD = 8  # bytes: every page of keys and values has whole ones; one head's scale of float32 has half a one


@kernel("pairs_ptr", "num_bytes")
def _copy_blocks_kernel(
    target_ptr: tl.tensor,
    source_ptr: tl.tensor,
    pairs_ptr: tl.tensor,
    num_bytes: int,
    target_stride_l: tl.tensor,
    target_stride_b: tl.tensor,
    source_stride_l: tl.tensor,
    source_stride_b: tl.tensor,
    CHUNK: tl.constexpr,
    WORD: tl.constexpr,
) -> None:
    pair = tl.program_id(0).to(tl.int64)
    layer = tl.program_id(1).to(tl.int64)
    source = tl.load(pairs_ptr + 2 * pair).to(tl.int64)
    target = tl.load(pairs_ptr + 2 * pair + 1).to(tl.int64)
    offsets = tl.program_id(2).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    mask = offsets < num_bytes // WORD * WORD  # pages are of whole words: the mask keeps the loads wide
    source_ptr += layer * source_stride_l + source * source_stride_b
    target_ptr += layer * target_stride_l + target * target_stride_b
    tl.store(target_ptr + offsets, tl.load(source_ptr + offsets, mask=mask), mask=mask)


@lru_cache(maxsize=8)
def copy_blocks_variant(index_dtype: torch.dtype = torch.int64, word: int = WORD) -> Variant:
    """How the kernel is built for pages of whole words of so many bytes."""
    strides = [f"{name}_stride_{axis}" for name in ("target", "source") for axis in "lb"]
    return Variant(
        kernel=_copy_blocks_kernel,
        signature={
            **dict.fromkeys(("target_ptr", "source_ptr"), "*u8"),
            "pairs_ptr": pointer_to(index_dtype),
            **dict.fromkeys(("num_bytes", *strides), "i32"),
        },
        constants={"CHUNK": CHUNK, "WORD": word},
        num_warps=4,
        num_stages=1,
    )


def copy_blocks(target: Tensor, source: Tensor, pairs: Tensor) -> None:
    """Copy blocks of `source` to blocks of `target` in every layer; both may be the same tensor.

    Args:
        target: (layers, num_blocks, page) of any dtype, last dimension contiguous; changed. Keys and values count as
            layers. Pages of whole multiples of 8 bytes are copied fastest.
        source: (layers, other num_blocks, page) of the same dtype, as `target`.
        pairs: (num_pairs, 2), int32 or int64, contiguous: a block of `source` and one of `target`. Within one tensor
            no block may be a target twice, or a source and a target (not checked).

    Raises:
        KernelArgumentError: a wrong shape, dtype, stride or device.
        KernelUnavailableError: no Triton, or no GPU and no interpreter.
    """
    _check(target, source, pairs)
    require_launchable(target.device, reference="copy_blocks_reference")
    source_bytes, target_bytes = source.view(torch.uint8), target.view(torch.uint8)
    num_bytes = target_bytes.shape[2]
    copy_blocks_variant(pairs.dtype, gcd(WORD, num_bytes)).launch(
        (pairs.shape[0], target.shape[0], cdiv(num_bytes, CHUNK)),
        {
            "target_ptr": target_bytes,
            "source_ptr": source_bytes,
            "pairs_ptr": pairs,
            "num_bytes": num_bytes,
            "target_stride_l": target_bytes.stride(0),
            "target_stride_b": target_bytes.stride(1),
            "source_stride_l": source_bytes.stride(0),
            "source_stride_b": source_bytes.stride(1),
        },
    )


def copy_blocks_reference(target: Tensor, source: Tensor, pairs: Tensor) -> None:
    """`copy_blocks` in torch, on any device; same arguments, effects and errors."""
    _check(target, source, pairs)
    sources, targets = pairs.long().unbind(1)
    target.view(torch.uint8)[:, targets] = source.view(torch.uint8)[:, sources]


def _check(target: Tensor, source: Tensor, pairs: Tensor) -> None:
    check_shape("target", target, (None, None, None), meaning="(layers, num_blocks, page)")
    check_shape("source", source, (target.shape[0], None, target.shape[2]), meaning="(layers, num_blocks, page)")
    check_dtype("source", source, (target.dtype,))
    for name, tensor in (("target", target), ("source", source)):
        check_last_stride(name, tensor)
    check_dtype("pairs", pairs, INDEX_DTYPES)
    check_shape("pairs", pairs, (None, 2), meaning="(num_pairs, 2)")
    if not pairs.is_contiguous():
        raise KernelArgumentError(f"pairs: expected a contiguous tensor, got strides {pairs.stride()}")
    check_same_device(("target", target), ("source", source), ("pairs", pairs))
