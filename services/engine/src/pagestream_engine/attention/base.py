"""Attention over the paged cache: what a layer asks for, what a step brings, and the interface of a backend's part."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from pagestream_engine.attention.kv_store import KVStore
from pagestream_engine.transfers import to_device


@dataclass(frozen=True, slots=True, eq=False)
class AttentionSpec:
    """How one layer attends. A query token sees the tokens of its sequence up to itself."""

    num_heads: int
    num_kv_heads: int
    """A divisor of `num_heads`: head h reads KV head h // (num_heads // num_kv_heads)."""
    head_dim: int
    """Elements of a head in the cache."""
    scale: float
    """Factor of the products of query and key, usually head_dim ** -0.5."""
    window: int | None = None
    """Most tokens that a query token sees, itself included; None: all."""
    soft_cap: float | None = None
    """Bound c of the scores, which become c * tanh(score / c) (Gemma 2)."""
    sinks: Tensor | None = None
    """(num_heads,) float32: a score of each head that takes part in the softmax and has no value (GPT-OSS)."""


class DeviceLengths(NamedTuple):
    """Lengths of a step's sequences, on the device."""

    seq_lens: Tensor
    """(sequences,) int32: as `AttentionBatch.seq_lens`."""
    cu_query_lens: Tensor
    """(sequences + 1,) int32: 0, then the running sum of `AttentionBatch.query_lens`."""


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """A step's packed tokens in one KV group: the new tokens of all prefills, then those of each decode.

    The keys and values of a sequence's first `seq_len - query_len` tokens are in the cache already.
    """

    positions: Tensor
    """(tokens,) int64: place of each token in its sequence."""
    slots: Tensor
    """(tokens,) int64: where its key and value go, block * block_size + offset."""
    block_tables: Tensor
    """(rows, most blocks) int32: of all running sequences. It is no copy: the next step edits it. Only entries with a
    token that some query token sees are read."""
    table_rows: Tensor
    """(sequences,) int64: of each sequence its row of `block_tables`."""
    query_lens: Sequence[int]
    """New tokens of each sequence, at least 1; of decodes a few, 1 without speculation."""
    seq_lens: Sequence[int]
    """Tokens of each sequence, the new ones included."""
    num_prefills: int
    """Leading sequences that are prefills."""
    prompt_lens: Sequence[int] | None = None
    """Of each sequence the leading tokens that are its prompt; None where all prefills are of prompts."""
    device_lengths: DeviceLengths | None = None
    """Where they have been sent with the step's other numbers: see `Attention.reads_device_lengths`."""

    @property
    def num_prefill_tokens(self) -> int:
        """Leading tokens that belong to prefills."""
        return sum(self.query_lens[: self.num_prefills])

    def lengths_on_device(self) -> DeviceLengths:
        """Return `device_lengths`; send them where they were not."""
        if self.device_lengths is not None:
            return self.device_lengths
        lengths = torch.tensor([*self.seq_lens, 0, *self.query_lens], dtype=torch.int32)
        lengths = to_device(lengths, self.positions.device)
        seq_lens, query_lens = torch.split(lengths, [len(self.seq_lens), 1 + len(self.query_lens)])
        return DeviceLengths(seq_lens, query_lens.cumsum(0, dtype=torch.int32))

    def gathered_tables(self, block_size: int) -> Tensor:
        """(sequences, most blocks) int32: a copy of the tables of the step's sequences, as wide as the longest."""
        return self.block_tables[:, : -(-max(self.seq_lens) // block_size)].index_select(0, self.table_rows)


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """One token of each of some sequences in one KV group, known on the device alone: for a step that is recorded once
    and run again with other numbers in the same tensors."""

    positions: Tensor
    """(tokens,) int64: place of each token in its sequence, which it is the last of."""
    slots: Tensor
    """(tokens,) int64: as `AttentionBatch.slots`."""
    block_tables: Tensor
    """(rows, most blocks) int32: as `AttentionBatch.block_tables`."""
    table_rows: Tensor
    """(tokens,) int64: of each token its sequence's row of `block_tables`."""


@dataclass(frozen=True, slots=True)
class StepContext:
    """What all layers of a step share."""

    positions: Tensor
    """(tokens,) int64: place of each token in its sequence."""
    slots: tuple[Tensor, ...]
    """For each KV group (tokens,) int64: where keys and values go."""
    metadata: tuple[Any, ...]
    """For each KV group what `Attention.prepare` returned."""


MetadataT = TypeVar("MetadataT")


class Attention(ABC, Generic[MetadataT]):
    """Attends to keys and values in the cache. `MetadataT` is what all layers of a KV group share in a step.

    A backend reads the cache only where a sequence has a token that some query token sees: what the rest of a block
    holds, NaN included, changes no result.
    """

    is_deterministic: ClassVar[bool] = False
    """Whether a token's results have the same bits in any batch, in any chunk, and whenever they are computed again."""

    prefill_equals_decode: ClassVar[bool] = True
    """Where it is deterministic: whether a token has the same bits as part of a prompt and as an output. Where not,
    keys and values of a decode must not stand for those of a prompt."""

    can_be_recorded: ClassVar[bool] = False
    """Whether `prepare_decodes` and `attend` launch the same kernels whatever a `DecodeBatch` holds, and read none of
    it on the host: what recording a CUDA graph takes."""

    reads_device_lengths: ClassVar[bool] = False
    """Whether `prepare` wants `AttentionBatch.device_lengths`."""

    def __init__(self, store: KVStore) -> None:
        self.store = store

    def check(self, spec: AttentionSpec) -> None:
        """Refuse a layer.

        Raises:
            ConfigError: this backend can't run it.
            ValueError: no backend can: its sinks are not as `AttentionSpec` says.
        """
        sinks = spec.sinks
        if sinks is None:
            return
        if sinks.dtype != torch.float32 or sinks.shape != (spec.num_heads,) or not sinks.is_contiguous():
            raise ValueError(
                f"sinks: given {sinks.dtype} of shape {tuple(sinks.shape)} and strides {sinks.stride()}, expected "
                f"contiguous torch.float32 of shape ({spec.num_heads},)"
            )

    @abstractmethod
    def prepare(self, batch: AttentionBatch, block_size: int) -> MetadataT:
        """Prepare, once a step, what every layer of a KV group with blocks of `block_size` tokens needs."""

    def prepare_decodes(self, batch: DecodeBatch, block_size: int) -> MetadataT:
        """Do `prepare` for decodes of one token. Here by reading their positions, which are to be on a CPU."""
        seq_lens = (batch.positions + 1).tolist()
        whole = AttentionBatch(
            positions=batch.positions,
            slots=batch.slots,
            block_tables=batch.block_tables,
            table_rows=batch.table_rows,
            query_lens=[1] * len(seq_lens),
            seq_lens=seq_lens,
            num_prefills=0,
        )
        return self.prepare(whole, block_size)

    @abstractmethod
    def attend(self, layer: int, query: Tensor, spec: AttentionSpec, metadata: MetadataT) -> Tensor:
        """Attend causally, the keys and values of all tokens being in the cache.

        Args:
            query: (tokens, num_heads, head_dim), rotated.
            metadata: of this step's batch in the layer's KV group.

        Returns:
            (tokens, num_heads * head_dim), in the packed order.
        """
