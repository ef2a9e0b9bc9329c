"""Attention by the Triton kernels: on a GPU, or on a CPU under Triton's interpreter (`TRITON_INTERPRET=1`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import pagestream_kernels as kernels
import torch
from pagestream_kernels.decode_plan import MAX_QUERY_LEN
from pagestream_kernels.paging import BLOCK_SIZES, MAX_HEAD_DIM
from pagestream_kernels.runtime import INTERPRETED
from torch import Tensor

from pagestream_engine.attention.base import Attention, AttentionBatch, AttentionSpec, DecodeBatch
from pagestream_engine.attention.kv_store import CacheShape
from pagestream_engine.errors import ConfigError
from pagestream_engine.transfers import to_device


@dataclass(frozen=True, slots=True)
class PrefillMetadata:
    """The prefill chunks, packed at the front."""

    block_tables: Tensor
    cu_query_lens: Tensor
    """(prefills + 1,) int32."""
    seq_lens: Tensor
    """(prefills,) int32."""
    max_query_len: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class DecodeMetadata:
    """The tokens of decodes, behind the prefill chunks."""

    block_tables: Tensor
    """(decodes, most blocks) int32."""
    seq_lens: Tensor
    """(decodes,) int32: the new tokens included."""
    cu_query_lens: Tensor | None
    """(decodes + 1,) int32; None where each has one token."""
    max_query_len: int
    plans: dict[tuple[int, int | None], kernels.DecodePlan]
    """By number of KV heads and window, filled when a layer first asks."""


@dataclass(frozen=True, slots=True)
class TritonMetadata:
    """What all layers of a KV group share in a step."""

    prefill: PrefillMetadata | None
    decode: DecodeMetadata | None


class TritonAttention(Attention[TritonMetadata]):
    """One kernel for decodes, one for prefill chunks."""

    can_be_recorded: ClassVar[bool] = True
    reads_device_lengths: ClassVar[bool] = True

    def prepare(self, batch: AttentionBatch, block_size: int) -> TritonMetadata:
        count = batch.num_prefills
        seq_lens, cu_query_lens = batch.lengths_on_device()
        tables = batch.gathered_tables(block_size)
        prefill = decode = None
        if count:
            prefill = PrefillMetadata(
                block_tables=tables[:count],
                cu_query_lens=cu_query_lens[: count + 1],
                seq_lens=seq_lens[:count],
                max_query_len=max(batch.query_lens[:count]),
                num_tokens=batch.num_prefill_tokens,
            )
        if count < len(batch.seq_lens):
            decode = _prepare_decode(batch, tables[count:], seq_lens[count:], cu_query_lens)
        return TritonMetadata(prefill, decode)

    def prepare_decodes(self, batch: DecodeBatch, block_size: int) -> TritonMetadata:
        """As `prepare`, with tables for the longest sequences that there may be: their width is part of a recording."""
        tables = batch.block_tables.index_select(0, batch.table_rows)
        return TritonMetadata(None, DecodeMetadata(tables, batch.positions.int() + 1, None, 1, {}))

    def attend(self, layer: int, query: Tensor, spec: AttentionSpec, metadata: TritonMetadata) -> Tensor:
        # The kernels take any strides; they name the token's dimension before the head's.
        keys, values = (cache.transpose(1, 2) for cache in self.store.layers[layer])
        query = query if query.stride(2) == 1 else query.contiguous()
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        first_decode = 0
        if metadata.prefill is not None:
            first_decode = metadata.prefill.num_tokens
            kernels.paged_prefill_attention(
                query[:first_decode],
                keys,
                values,
                metadata.prefill.block_tables,
                metadata.prefill.cu_query_lens,
                metadata.prefill.seq_lens,
                max_query_len=metadata.prefill.max_query_len,
                scale=spec.scale,
                window=spec.window,
                soft_cap=spec.soft_cap,
                sinks=spec.sinks,
                out=output[:first_decode],
            )
        if metadata.decode is not None:
            key = (spec.num_kv_heads, spec.window)
            if key not in metadata.decode.plans:
                metadata.decode.plans[key] = kernels.plan_decode(
                    metadata.decode.seq_lens,
                    num_kv_heads=spec.num_kv_heads,
                    window=spec.window,
                    cu_query_lens=metadata.decode.cu_query_lens,
                    max_query_len=metadata.decode.max_query_len,
                )
            kernels.paged_decode_attention(
                query[first_decode:],
                keys,
                values,
                metadata.decode.block_tables,
                metadata.decode.seq_lens,
                scale=spec.scale,
                window=spec.window,
                soft_cap=spec.soft_cap,
                sinks=spec.sinks,
                cu_query_lens=metadata.decode.cu_query_lens,
                max_query_len=metadata.decode.max_query_len,
                out=output[first_decode:],
                plan=metadata.decode.plans[key],
            )
        return output.view(query.shape[0], -1)


def _prepare_decode(batch: AttentionBatch, tables: Tensor, seq_lens: Tensor, cu_query_lens: Tensor) -> DecodeMetadata:
    """Prepare decodes of (decodes,) int32 lengths; tokens beyond what the kernel takes are sequences of their own.

    `cu_query_lens` are those of the whole step.
    """
    query_lens = batch.query_lens[batch.num_prefills :]
    longest = max(query_lens)
    if longest == 1:
        return DecodeMetadata(tables, seq_lens, None, 1, {})
    if longest <= MAX_QUERY_LEN:
        starts = cu_query_lens[batch.num_prefills :]
        return DecodeMetadata(tables, seq_lens, starts - starts[0], longest, {})
    counts = to_device(torch.tensor(query_lens), tables.device)
    tables = tables.repeat_interleave(counts, dim=0, output_size=sum(query_lens))
    return DecodeMetadata(tables, batch.positions[batch.num_prefill_tokens :].int() + 1, None, 1, {})


def check_supported(shapes: Sequence[CacheShape], device: torch.device) -> None:
    """Refuse what the kernels can't run, when the engine starts and not in the middle of a request.

    Raises:
        ConfigError: the block size, the head size, or a CPU without the interpreter; it names the option to change.
    """
    if device.type != "cuda" and not INTERPRETED:
        raise ConfigError(
            "attention_backend", "triton", "torch on a CPU", "Triton needs a GPU, or TRITON_INTERPRET=1 at the start"
        )
    for shape in shapes:
        if shape.block_size not in BLOCK_SIZES:
            raise ConfigError("block_size", shape.block_size, f"one of {', '.join(map(str, BLOCK_SIZES))} with Triton")
        if shape.head_dim > MAX_HEAD_DIM:
            raise ConfigError(
                "attention_backend",
                "triton",
                "torch",
                f"heads have {shape.head_dim} elements, the kernels take {MAX_HEAD_DIM}",
            )
