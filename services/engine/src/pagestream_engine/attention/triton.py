"""Attention, KV store and operators by the Triton kernels: on a GPU, or on a CPU with `TRITON_INTERPRET=1`.

In the deterministic ones prefill and decode add in different orders, each the same for a token in any batch and any
chunk. So what decides is which of them computes a token: prompts are computed by prefill, outputs by decode, also where
they are computed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pagestream_kernels as kernels
import torch
import triton
from pagestream_kernels.decode_plan import FIXED_SPLIT_TOKENS, MAX_QUERY_LEN
from pagestream_kernels.launcher import compilations
from pagestream_kernels.paging import BLOCK_SIZES, FLOAT8_BLOCK_SIZES, MAX_HEAD_DIM
from pagestream_kernels.prebuild import take_prebuilt
from pagestream_kernels.runtime import can_launch
from torch import Tensor
from triton.errors import TritonError

from pagestream_engine.attention.base import (
    Angles,
    Attention,
    AttentionBatch,
    AttentionSpec,
    Backend,
    CacheShape,
    DecodeBatch,
    HeadNorm,
    KVStore,
    Rotation,
)
from pagestream_engine.attention.torch import DeterministicTorchOperators, TorchOperators
from pagestream_engine.errors import ConfigError
from pagestream_engine.transfers import to_device

FLOAT8_CAPABILITY = (8, 9)
"""Least compute capability of an NVIDIA GPU for which Triton compiles float8 of 4 and 3 bits. On AMD it has them all,
by instructions or by integers."""

Int64Array = npt.NDArray[np.int64]


def make_backend(shapes: Sequence[CacheShape], device: torch.device, *, deterministic: bool) -> Backend:
    """Build the backend of the Triton kernels; see `select_backend`."""
    check_supported(shapes, device)
    store, dtype = TritonKVStore(shapes, device), shapes[0].dtype
    attention: TritonAttention = TritonAttention(store)
    operators = TritonOperators(dtype)
    if deterministic:
        attention, operators = DeterministicTritonAttention(store), DeterministicTritonOperators(dtype)
    backend = Backend("triton", store, attention, operators, f"triton {triton.__version__}")
    if device.type == "cpu":  # interpreted
        return backend
    take_prebuilt()
    return replace(backend, num_compilations=lambda: compilations.count, compile_errors=(TritonError,))


@dataclass(frozen=True, slots=True)
class PrefillMetadata:
    """The prefill chunks, packed at the front."""

    block_tables: Tensor
    """(rows, most blocks) int32: resident, of all running sequences."""
    table_rows: Tensor
    """(prefills,) int64."""
    cu_query_lens: Tensor
    """(prefills + 1,) int32."""
    seq_lens: Tensor
    """(prefills,) int32."""
    num_tokens: int
    plans: dict[tuple[int, int], kernels.PrefillPlan]
    """By numbers of heads and of KV heads, filled when a layer first asks."""


@dataclass(frozen=True, slots=True)
class DecodeMetadata:
    """Tokens that the decode kernel computes in one launch, packed behind the prefill chunks."""

    block_tables: Tensor
    """(rows, most blocks) int32: resident, of all running sequences."""
    table_rows: Tensor
    """(sequences,) int64."""
    seq_lens: Tensor
    """(sequences,) int32: the new tokens included."""
    cu_query_lens: Tensor | None
    """(sequences + 1,) int32; None where each has one token."""
    max_query_len: int
    num_tokens: int
    max_seq_len: int
    """A bound on `seq_lens`."""
    plans: dict[tuple[int, int | None], kernels.DecodePlan] = field(default_factory=dict)
    """By number of KV heads and window, filled when a layer first asks."""


@dataclass(frozen=True, slots=True)
class TritonMetadata:
    """What all layers of a KV group share in a step."""

    prefill: PrefillMetadata | None
    decodes: Sequence[DecodeMetadata]
    """In the order of their tokens."""
    order: Tensor | None = None
    """(tokens,) int64: the packed token at each place of this order; None where they are packed so."""
    places: Tensor | None = None
    """(tokens,) int64: the inverse of `order`."""


class TritonAttention(Attention[TritonMetadata]):
    """One kernel for decodes, one for prefill chunks."""

    can_be_recorded: ClassVar[bool] = True
    reads_device_lengths: ClassVar[bool] = True
    split_tokens: ClassVar[int | None] = None
    """As `plan_decode` has it: None divides a step's decodes evenly."""

    def prepare(self, batch: AttentionBatch, block_size: int) -> TritonMetadata:
        count = batch.num_prefills
        seq_lens, cu_query_lens = batch.lengths_on_device()
        prefill = None
        if count:
            prefill = PrefillMetadata(
                block_tables=batch.block_tables,
                table_rows=batch.table_rows[:count],
                cu_query_lens=cu_query_lens[: count + 1],
                seq_lens=seq_lens[:count],
                num_tokens=batch.num_prefill_tokens,
                plans={},
            )
        if count == len(batch.seq_lens):
            return TritonMetadata(prefill, ())
        return TritonMetadata(prefill, (prepare_decode(batch, seq_lens[count:], cu_query_lens),))

    def prepare_decodes(self, batch: DecodeBatch, block_size: int) -> TritonMetadata:
        """As `prepare`, for lengths up to what the tables have room for: a bound on them is part of a recording."""
        num_tokens = len(batch.positions)
        seq_lens = torch.add(batch.positions, 1, out=batch.positions.new_empty(num_tokens, dtype=torch.int32))
        longest = batch.block_tables.shape[1] * block_size
        decode = DecodeMetadata(batch.block_tables, batch.table_rows, seq_lens, None, 1, num_tokens, longest)
        return TritonMetadata(None, (decode,))

    def attend(self, layer: int, query: Tensor, spec: AttentionSpec, metadata: TritonMetadata) -> Tensor:
        # The kernels take any strides; they name the token's dimension before the head's.
        keys, values = (cache.transpose(1, 2) for cache in self.store.layers[layer])
        query = query if query.stride(2) == 1 else query.contiguous()
        if metadata.order is not None:
            query = query.index_select(0, metadata.order)
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        scales = self.store.scales.get(layer)
        of_cache = {} if scales is None else {"key_scales": scales.keys, "value_scales": scales.values}
        options: dict[str, Any] = {
            **of_cache,
            "scale": spec.scale,
            "window": spec.window,
            "soft_cap": spec.soft_cap,
            "sinks": spec.sinks,
            "slopes": spec.slopes,
            "rounds_slopes": spec.rounds_slopes,
        }
        end = 0
        if metadata.prefill is not None:
            end = metadata.prefill.num_tokens
            prefill, heads = metadata.prefill, (query.shape[1], keys.shape[2])
            if heads not in prefill.plans:
                prefill.plans[heads] = kernels.plan_prefill(
                    query[:end], keys, values, prefill.cu_query_lens, prefill.seq_lens, **of_cache
                )
            kernels.paged_prefill_attention(
                query[:end],
                keys,
                values,
                prefill.block_tables,
                prefill.cu_query_lens,
                prefill.seq_lens,
                table_rows=prefill.table_rows,
                out=output[:end],
                plan=prefill.plans[heads],
                **options,
            )
        programs = kernels.programs_per_processor(query, keys)
        for decode in metadata.decodes:
            begin, end = end, end + decode.num_tokens
            kernels.paged_decode_attention(
                query[begin:end],
                keys,
                values,
                decode.block_tables,
                decode.seq_lens,
                table_rows=decode.table_rows,
                cu_query_lens=decode.cu_query_lens,
                max_query_len=decode.max_query_len,
                out=output[begin:end],
                plan=self._plan(decode, spec, programs),
                **options,
            )
        if metadata.places is not None:
            output = output.index_select(0, metadata.places)
        return output.view(query.shape[0], -1)

    def _plan(self, decode: DecodeMetadata, spec: AttentionSpec, programs: int) -> kernels.DecodePlan:
        """The plan of a launch for layers like this one: made once a step."""
        key = (spec.num_kv_heads, spec.window)
        if key not in decode.plans:
            decode.plans[key] = kernels.plan_decode(
                decode.seq_lens,
                num_kv_heads=spec.num_kv_heads,
                split_tokens=self.split_tokens,
                max_seq_len=decode.max_seq_len,
                window=spec.window,
                cu_query_lens=decode.cu_query_lens,
                max_query_len=decode.max_query_len,
                programs_per_processor=programs,
            )
        return decode.plans[key]


def prepare_decode(batch: AttentionBatch, seq_lens: Tensor, cu_query_lens: Tensor) -> DecodeMetadata:
    """Prepare a batch's decodes of (decodes,) int32 lengths; those of more tokens than the kernel takes become as many
    sequences of one.

    `cu_query_lens` are those of the whole step.
    """
    query_lens = batch.query_lens[batch.num_prefills :]
    tables, rows = batch.block_tables, batch.table_rows[batch.num_prefills :]
    longest, num_tokens, most = max(query_lens), sum(query_lens), max(batch.seq_lens[batch.num_prefills :])
    if longest == 1:
        return DecodeMetadata(tables, rows, seq_lens, None, 1, num_tokens, most)
    if longest <= MAX_QUERY_LEN:
        starts = cu_query_lens[batch.num_prefills :]
        return DecodeMetadata(tables, rows, seq_lens, starts - starts[0], longest, num_tokens, most)
    counts = to_device(torch.tensor(query_lens), rows.device)
    rows = rows.repeat_interleave(counts, output_size=num_tokens)
    own_lens = batch.positions[batch.num_prefill_tokens :].int() + 1
    return DecodeMetadata(tables, rows, own_lens, None, 1, num_tokens, most)


def check_supported(shapes: Sequence[CacheShape], device: torch.device) -> None:
    """Refuse what the kernels can't run, when the engine starts and not in the middle of a request.

    Raises:
        ConfigError: the block size, the head size, a GPU without float8 or a CPU without the interpreter; it names the
            option to change.
    """
    if not can_launch(device):
        raise ConfigError(
            "attention_backend", "triton", "torch on a CPU", "Triton needs a GPU, or TRITON_INTERPRET=1 at the start"
        )
    has_scales = shapes[0].has_scales
    if has_scales and device.type == "cuda" and torch.version.hip is None:
        capability = torch.cuda.get_device_capability(device)
        if capability < FLOAT8_CAPABILITY:
            own, least = (".".join(map(str, each)) for each in (capability, FLOAT8_CAPABILITY))
            hint = f"it has compute capability {own}, and float8 begins with {least}: Ada, Hopper and later ones"
            raise ConfigError("kv_cache_dtype", "fp8", f"auto on this GPU, {torch.cuda.get_device_name(device)}", hint)
    if shapes[0].stored_dtype != shapes[0].dtype and not has_scales:
        given, expected = shapes[0].stored_dtype, f"auto or fp8 with Triton and a model of {shapes[0].dtype}"
        raise ConfigError("kv_cache_dtype", str(given).removeprefix("torch."), expected)
    if has_scales and len({shape.num_kv_heads for shape in shapes}) > 1:
        raise ConfigError("kv_cache_dtype", "fp8", "auto with Triton", "the model's layers differ in their KV heads")
    sizes, kind = (FLOAT8_BLOCK_SIZES, " and a cache of fp8") if has_scales else (BLOCK_SIZES, "")
    for shape in shapes:
        if shape.block_size not in sizes:
            expected = f"one of {', '.join(map(str, sizes))} with Triton{kind}"
            raise ConfigError("block_size", shape.block_size, expected)
        if shape.head_dim > MAX_HEAD_DIM:
            raise ConfigError(
                "attention_backend",
                "triton",
                "torch",
                f"heads have {shape.head_dim} elements, the kernels take {MAX_HEAD_DIM}",
            )


class TritonKVStore(KVStore):
    """Norms, rotates and writes in one pass, and copies blocks of all layers in one launch. Values of float8 lie
    transposed in their pages."""

    def __init__(self, shapes: Sequence[CacheShape], device: torch.device) -> None:
        super().__init__(shapes, device)
        self._still: Rotation | None = None
        if self.has_scales:  # made here: a recorded step sends nothing from the host
            self._still = Rotation(torch.tensor([[1.0, 0.0]], device=device))

    def _view_values(self, pages: Tensor, shape: CacheShape) -> Tensor:
        if not shape.has_scales:
            return super()._view_values(pages, shape)
        return pages.view(len(pages), shape.num_kv_heads, shape.head_dim, shape.block_size).transpose(2, 3)

    def write(self, layer: int, key: Tensor, value: Tensor, slots: Tensor) -> None:
        if self._still is None:
            super().write(layer, key, value, slots)
            return
        # The kernel that quantises turns on its way: by no angle, and a query that nobody reads.
        key, value = (x if x.stride(2) == 1 else x.contiguous() for x in (key, value))
        self._quantise(layer, (key.clone(), key, value), slots, Angles(self._still, torch.zeros_like(slots)))

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        sources, targets = zip(*copies, strict=True)
        if not set(sources).isdisjoint(targets):  # the kernel reads and writes at once
            super().copy_blocks(copies)
            return
        pairs = to_device(torch.tensor(copies), self.device)
        for part in self.parts:
            layers = part.flatten(0, 1)
            kernels.copy_blocks(layers, layers, pairs)

    def rotates(self, rotation: Rotation, head_dim: int, norm: HeadNorm | None) -> bool:
        # The kernels multiply by weights of the heads' dtype alone.
        return rotation.rotary_dim <= head_dim and (norm is None or norm.query_weight.dtype == self.dtype)

    def rotate_and_write(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        slots: Tensor,
        angles: Angles,
        norm: HeadNorm | None,
    ) -> Tensor:
        # The kernels name the token's dimension before the head's.
        query, key, value = (x if x.stride(2) == 1 else x.contiguous() for x in (query, key, value))
        if self.has_scales:
            self._quantise(layer, (query, key, value), slots, angles, norm)
            return query
        keys, values = (cache.transpose(1, 2) for cache in self.layers[layer])
        rotation = angles.rotation
        kernels.rope_and_cache(
            *(query, key, value, rotation.cos_sin, angles.positions, keys, values, slots),
            norm=_norm_of(norm),
            interleaved=rotation.interleaved,
        )
        return query

    def _quantise(
        self,
        layer: int,
        rows: tuple[Tensor, Tensor, Tensor],
        slots: Tensor,
        angles: Angles,
        norm: HeadNorm | None = None,
    ) -> None:
        keys, values = (cache.transpose(1, 2) for cache in self.layers[layer])
        rotation = angles.rotation
        kernels.rope_and_quantise(
            *rows,
            rotation.cos_sin,
            angles.positions,
            keys,
            values,
            *self.scales[layer],
            slots,
            norm=_norm_of(norm),
            interleaved=rotation.interleaved,
        )


def _norm_of(norm: HeadNorm | None) -> kernels.HeadNorm | None:
    """Return a norm as the kernels take it."""
    return None if norm is None else kernels.HeadNorm(norm.query_weight, norm.key_weight, norm.eps)


class TritonOperators(TorchOperators):
    """The Triton kernels, and torch operations for what is rare."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if weight.dtype != x.dtype:
            return super().rms_norm(x, weight, eps)
        return kernels.rms_norm(x, weight, eps=eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        if weight.dtype != x.dtype:
            return super().add_rms_norm(x, residual, weight, eps)
        return kernels.rms_norm(x, weight, eps=eps, residual=residual)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        return kernels.silu_and_mul(gate_up)


class DeterministicTritonOperators(TritonOperators, DeterministicTorchOperators):
    """The Triton kernels, each of whose sums lies within a row; what is rare by operations on single elements."""


_MAX_PIECES = 4096
"""Pieces of one token and one fixed split in a launch that replays: 68 MB of scratch with 32 heads of 128."""


class DeterministicTritonAttention(TritonAttention):
    """Prompts by the prefill kernel, everything after them by the decode kernel with fixed splits.

    A chunk that computes outputs of a sequence again, after it was preempted or resumed elsewhere, goes through the
    decode kernel in pieces of up to 16 tokens, which have the bits of single decodes.
    """

    is_deterministic = True
    prefill_equals_decode = False
    split_tokens: ClassVar[int | None] = FIXED_SPLIT_TOKENS

    def prepare(self, batch: AttentionBatch, block_size: int) -> TritonMetadata:
        prompts = _prompt_tokens(batch)
        if prompts is None:
            return super().prepare(batch, block_size)
        query_lens, starts = _int64(batch.query_lens), _int64(batch.seq_lens) - _int64(batch.query_lens)
        order, places = _prompts_first(query_lens, prompts, batch.table_rows.device)
        decodes = _replays(batch, query_lens - prompts, starts + prompts)
        count = batch.num_prefills
        if count < len(batch.seq_lens):
            seq_lens, cu_query_lens = batch.lengths_on_device()
            decodes.append(prepare_decode(batch, seq_lens[count:], cu_query_lens))
        return TritonMetadata(_prefill(batch, prompts, starts), decodes, order, places)


def _prompt_tokens(batch: AttentionBatch) -> Int64Array | None:
    """(sequences,): how many of each sequence's tokens are of its prompt; None where it is all of every prefill."""
    count = batch.num_prefills
    if batch.prompt_lens is None or not count:
        return None
    query_lens, seq_lens = _int64(batch.query_lens[:count]), _int64(batch.seq_lens[:count])
    beyond = np.clip(seq_lens - _int64(batch.prompt_lens[:count]), 0, query_lens)
    if not beyond.any():
        return None
    return np.concatenate((query_lens - beyond, np.zeros(len(batch.seq_lens) - count, np.int64)))


def _prompts_first(query_lens: Int64Array, prompts: Int64Array, device: torch.device) -> tuple[Tensor, Tensor]:
    """Order packed tokens so that those of prompts come first. Return (tokens,) int64: the order, and its inverse."""
    owners = np.repeat(np.arange(len(query_lens)), query_lens)
    offsets = np.arange(len(owners)) - (query_lens.cumsum() - query_lens)[owners]
    order = np.argsort(offsets >= prompts[owners], kind="stable")
    return _to_device(order, device), _to_device(np.argsort(order), device)


def _prefill(batch: AttentionBatch, prompts: Int64Array, starts: Int64Array) -> PrefillMetadata | None:
    """Prepare the prompts' tokens of each sequence, from its first new one at `starts`."""
    (seqs,) = prompts.nonzero()
    if not len(seqs):
        return None
    counts, device = prompts[seqs], batch.table_rows.device
    return PrefillMetadata(
        block_tables=batch.block_tables,
        table_rows=batch.table_rows.index_select(0, _to_device(seqs, device)),
        cu_query_lens=_to_device(_running_sum(counts), device),
        seq_lens=_to_device((starts[seqs] + counts).astype(np.int32), device),
        plans={},
        num_tokens=int(counts.sum()),
    )


def _replays(batch: AttentionBatch, counts: Int64Array, starts: Int64Array) -> list[DecodeMetadata]:
    """Prepare the outputs that prefills compute again: so many of each sequence, from `starts` on.

    A launch has as many pieces of 16 tokens as its scratch is bounded to.
    """
    num_prefills, device = batch.num_prefills, batch.table_rows.device
    pieces = [
        (seq, first, min(MAX_QUERY_LEN, counts[seq] - first))
        for seq in range(num_prefills)
        for first in range(0, int(counts[seq]), MAX_QUERY_LEN)
    ]
    num_splits = -(-int((starts + counts)[:num_prefills].max()) // FIXED_SPLIT_TOKENS)
    at_once = max(1, _MAX_PIECES // (MAX_QUERY_LEN * num_splits))
    launches = []
    for begin in range(0, len(pieces), at_once):
        seqs, firsts, lengths = np.array(pieces[begin : begin + at_once], np.int64).T
        seq_lens = starts[seqs] + firsts + lengths
        launches.append(
            DecodeMetadata(
                block_tables=batch.block_tables,
                table_rows=batch.table_rows.index_select(0, _to_device(seqs, device)),
                seq_lens=_to_device(seq_lens.astype(np.int32), device),
                cu_query_lens=_to_device(_running_sum(lengths), device),
                max_query_len=MAX_QUERY_LEN,
                num_tokens=int(lengths.sum()),
                max_seq_len=int(seq_lens.max()),
            )
        )
    return launches


def _running_sum(counts: Int64Array) -> np.ndarray:
    return np.concatenate(((0,), counts.cumsum())).astype(np.int32)


def _int64(numbers: object) -> Int64Array:
    return np.array(numbers, np.int64)


def _to_device(numbers: np.ndarray, device: torch.device) -> Tensor:
    return to_device(torch.from_numpy(np.ascontiguousarray(numbers)), device)
