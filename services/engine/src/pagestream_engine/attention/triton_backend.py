"""Attention by the Triton kernels: on a GPU, or on a CPU under Triton's interpreter (`TRITON_INTERPRET=1`)."""

from __future__ import annotations

from dataclasses import dataclass

import pagestream_kernels as kernels
import torch
from pagestream_kernels.paging import BLOCK_SIZES, MAX_HEAD_DIM
from pagestream_kernels.runtime import INTERPRETED
from torch import Tensor

from pagestream_engine.attention.base import AttentionBackend, AttentionBatch, CacheShape
from pagestream_engine.errors import ConfigError


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """The prefill chunks, packed at the front."""

    block_tables: Tensor
    cu_query_lens: Tensor
    """(prefills + 1,) int32."""
    seq_lens: Tensor
    """(prefills,) int32."""
    max_query_len: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """The decodes, one token each, behind the prefill chunks."""

    block_tables: Tensor
    seq_lens: Tensor
    """(decodes,) int32."""
    splits: kernels.DecodePlan


@dataclass(frozen=True, slots=True)
class TritonPlan:
    """What all layers of a step share."""

    batch: AttentionBatch
    prefill: PrefillPlan | None
    decode: DecodePlan | None


class TritonBackend(AttentionBackend[TritonPlan]):
    """One kernel for decodes, one for prefill chunks, and one for each small step between the matrix products."""

    def __init__(self, shape: CacheShape, cos_sin: Tensor) -> None:
        """Raise ConfigError for what the kernels can't run: see `check_supported`."""
        super().__init__(shape, cos_sin)
        check_supported(shape, cos_sin.device)

    def allocate(self, num_blocks: int) -> None:
        super().allocate(num_blocks)
        # The kernels take any strides; they name the token's dimension before the head's.
        self.key_cache = [cache.transpose(1, 2) for cache in self.key_cache]
        self.value_cache = [cache.transpose(1, 2) for cache in self.value_cache]

    def plan(self, batch: AttentionBatch) -> TritonPlan:
        count = batch.num_prefills
        seq_lens = torch.tensor(batch.seq_lens, dtype=torch.int32, device=self.device)
        prefill = decode = None
        if count:
            query_lens = torch.tensor([0, *batch.query_lens[:count]], dtype=torch.int32)
            prefill = PrefillPlan(
                block_tables=batch.block_tables[:count],
                cu_query_lens=query_lens.cumsum(0, dtype=torch.int32).to(self.device, non_blocking=True),
                seq_lens=seq_lens[:count],
                max_query_len=max(batch.query_lens[:count]),
                num_tokens=batch.num_prefill_tokens,
            )
        if count < len(batch.seq_lens):
            lens = seq_lens[count:]
            splits = kernels.plan_decode(lens, num_kv_heads=self.shape.num_kv_heads)
            decode = DecodePlan(batch.block_tables[count:], lens, splits)
        return TritonPlan(batch, prefill, decode)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, plan: TritonPlan) -> Tensor:
        keys, values = self.key_cache[layer], self.value_cache[layer]
        kernels.rope_and_cache(query, key, value, self.cos_sin, plan.batch.positions, keys, values, plan.batch.slots)
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        first_decode = 0
        if plan.prefill is not None:
            first_decode = plan.prefill.num_tokens
            kernels.paged_prefill_attention(
                query[:first_decode],
                keys,
                values,
                plan.prefill.block_tables,
                plan.prefill.cu_query_lens,
                plan.prefill.seq_lens,
                max_query_len=plan.prefill.max_query_len,
                scale=self.scale,
                out=output[:first_decode],
            )
        if plan.decode is not None:
            kernels.paged_decode_attention(
                query[first_decode:],
                keys,
                values,
                plan.decode.block_tables,
                plan.decode.seq_lens,
                scale=self.scale,
                out=output[first_decode:],
                plan=plan.decode.splits,
            )
        return output.view(query.shape[0], -1)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return kernels.rms_norm(x, weight, eps=eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return kernels.rms_norm(x, weight, eps=eps, residual=residual)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        return kernels.silu_and_mul(gate_up)


def check_supported(shape: CacheShape, device: torch.device) -> None:
    """Refuse what the kernels can't run, when the engine starts and not in the middle of a request.

    Raises:
        ConfigError: the block size, the head size, or a CPU without the interpreter; it names the option to change.
    """
    if device.type != "cuda" and not INTERPRETED:
        raise ConfigError(
            "attention_backend", "triton", "torch on a CPU", "Triton needs a GPU, or TRITON_INTERPRET=1 at the start"
        )
    if shape.block_size not in BLOCK_SIZES:
        raise ConfigError("block_size", shape.block_size, f"one of {', '.join(map(str, BLOCK_SIZES))} with Triton")
    if shape.head_dim > MAX_HEAD_DIM:
        raise ConfigError(
            "attention_backend",
            "triton",
            "torch",
            f"heads have {shape.head_dim} elements, the kernels take {MAX_HEAD_DIM}",
        )
