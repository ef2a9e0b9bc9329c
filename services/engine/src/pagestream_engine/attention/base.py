"""What a backend is: the paged KV store, attention over it, and the small operators, and what a step brings to them.

`Backend` is the three together. `AttentionSpec` is what a layer asks for, `AttentionBatch` and `DecodeBatch` are what a
step brings, `KVStore` is the tensors of the cache: written by slot, copied by block, viewed by layer. In float8 each
block and head has a scale (docs/design/kv-cache.md has the format). `PagedAttention` is what a model's layer calls.
"""

from __future__ import annotations

import math
import mmap
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Generic, Literal, NamedTuple, TypeVar

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own habit
from torch import Tensor

from pagestream_engine.transfers import to_device


@dataclass(frozen=True, slots=True, eq=False)
class Rotation:
    """Rotary position embedding (Su et al. 2021, arXiv:2104.09864) of a head's first `rotary_dim` elements."""

    cos_sin: Tensor
    """(positions, rotary_dim) float32: cosines, then sines, of each position's `rotary_dim / 2` angles."""
    interleaved: bool = False
    """Whether neighbours 2i and 2i + 1 turn together (GPT-J), in place of i and i + rotary_dim / 2 (GPT-NeoX)."""
    rotary_dim: int = field(init=False)
    """Leading elements of a head that turn; the rest stay as they are."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "rotary_dim", self.cos_sin.shape[1])


@dataclass(frozen=True, slots=True, eq=False)
class Angles:
    """A rotation at a step's positions: made once a step for all layers that share the rotation."""

    rotation: Rotation
    positions: Tensor
    """(tokens,) int64."""
    cos: Tensor | None = None
    """(tokens, 1, rotary_dim) of the model's dtype, where the operators look angles up once a step."""
    sin: Tensor | None = None
    """As `cos`, negative for an element that takes its partner's share with a minus sign."""


@dataclass(frozen=True, slots=True, eq=False)
class HeadNorm:
    """RMS norms of each head's query and key, before their rotation."""

    query_weight: Tensor
    """(head_dim,): as `Operators.rms_norm` takes it."""
    key_weight: Tensor
    """As `query_weight`, of the same dtype."""
    eps: float


Activation = Literal["silu", "gelu", "gelu_tanh"]
"""Of an MLP; `gelu_tanh` is gelu by its tanh formula."""


class Operators(ABC):
    """One backend's small steps. Results are rounded to the dtype of the arguments; sums are taken in float32."""

    @abstractmethod
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / rms(x) * weight over the last dimension (Zhang and Sennrich 2019, arXiv:1910.07467).

        With a weight of x's dtype, x / rms(x) is rounded before the product (Llama); with one in float32 the product
        alone is (Gemma).
        """

    @abstractmethod
    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """The norm of `x + residual`, and that sum; both arguments may be overwritten."""

    @abstractmethod
    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """(tokens, 2 * d) -> (tokens, d): silu of the first half times the second."""

    @abstractmethod
    def gelu_and_mul(self, gate_up: Tensor, *, tanh: bool) -> Tensor:
        """As `silu_and_mul` with gelu (Hendrycks and Gimpel 2016, arXiv:1606.08415), exact or by its tanh formula."""

    def gated_by(self, activation: Activation) -> Callable[[Tensor], Tensor]:
        """Return the one of both that an MLP's activation needs."""
        return self.silu_and_mul if activation == "silu" else partial(self.gelu_and_mul, tanh=activation == "gelu_tanh")

    @abstractmethod
    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        """(x - mean(x)) / deviation(x) * weight + bias over the last dimension (Ba et al. 2016, arXiv:1607.06450).

        Args:
            x: (..., size), contiguous but for the first of three dimensions.
            weight: (size,), or (heads, size) for x (tokens, heads, size).
            bias: as `weight`; None: 0.
        """

    @abstractmethod
    def add_layer_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        """The norm of `x + residual`, and that sum; both arguments may be overwritten."""

    @abstractmethod
    def activate(self, x: Tensor, activation: Activation) -> Tensor:
        """Apply an activation to each element; x may be overwritten."""

    def angles(self, rotation: Rotation, positions: Tensor) -> Angles:
        """Return a rotation at a step's positions, (tokens,) int64."""
        return Angles(rotation, positions)

    @abstractmethod
    def rotate(self, query: Tensor, key: Tensor, angles: Angles) -> tuple[Tensor, Tensor]:
        """Rotate query (tokens, num_heads, head_dim) and key (tokens, num_kv_heads, head_dim); both may be
        overwritten.
        """


FLOAT8 = torch.float8_e4m3fn
LARGEST = 448.0
"""Of the format, which has no infinity."""
_MOST_EXPONENT = 60
"""Of a scale, and the least with a minus sign."""


def scales_for(largest: Tensor) -> Tensor:
    """Return, of finite magnitudes in float32, the least powers of two by which they are at most LARGEST."""
    bits = largest.view(torch.int32)
    exponents = (bits >> 23) - 127 - 8 + ((bits & 0x7FFFFF) > 0x600000).int()  # 448 is 1.75 * 2^8
    return torch.exp2(exponents.clamp(-_MOST_EXPONENT, _MOST_EXPONENT).float())


def write_scaled(pages: Tensor, scales: Tensor, rows: Tensor, slots: Tensor) -> None:
    """Write tokens to their blocks. Where they need a larger scale, what a block has already is rounded again.

    Args:
        pages: (num_blocks, num_kv_heads, block_size, head_dim) FLOAT8.
        scales: (num_blocks, num_kv_heads) float32.
        rows: (tokens, num_kv_heads, head_dim).
        slots: (tokens,) int64: block * block_size + offset, as `KVStore.write` has them.
    """
    size, rows, raw = pages.shape[2], rows.float(), pages.view(torch.uint8)
    blocks, places = torch.unique(slots // size, return_inverse=True)
    offsets = slots % size
    is_new = torch.zeros_like(blocks, dtype=torch.bool).index_fill_(0, places[offsets == 0], True)
    magnitudes = rows.abs()
    largest = magnitudes.where(magnitudes.isfinite(), 0.0).amax(dim=2)
    needed = largest.new_zeros(len(blocks), largest.shape[1])
    needed.scatter_reduce_(0, places[:, None].expand_as(largest), largest, "amax")
    held = scales[blocks].masked_fill_(is_new[:, None], 0.0)
    now = torch.maximum(held, scales_for(needed))
    whole = raw[blocks].view(FLOAT8).float().mul_((held / now)[:, :, None, None])
    whole[places, :, offsets] = rows / now[places][:, :, None]
    raw[blocks] = whole.clamp_(-LARGEST, LARGEST).to(FLOAT8).view(torch.uint8)
    scales[blocks] = now


def dequantised(pages: Tensor, scales: Tensor, blocks: Tensor) -> Tensor:
    """Copy blocks of `pages`, (used,) int64, to float32: (used, num_kv_heads, block_size, head_dim)."""
    held = pages.view(torch.uint8).index_select(0, blocks).view(FLOAT8).float()
    return held.mul_(scales.index_select(0, blocks)[:, :, None, None])


@dataclass(frozen=True)
class CacheShape:
    """The cache of a KV group: of each of its layers keys and values, (num_blocks, num_kv_heads, block_size, head_dim)
    each.
    """

    layers: tuple[int, ...]
    """Indices of the group's layers in the model."""
    num_kv_heads: int
    head_dim: int
    block_size: int
    """Tokens a block."""
    dtype: torch.dtype
    """Of queries, and of keys and values as attention computes with them."""
    cache_dtype: torch.dtype | None = None
    """What keys and values are kept as; None: `dtype`. With float8_e4m3fn each block and KV head has a scale for its
    keys and one for its values."""

    @property
    def stored_dtype(self) -> torch.dtype:
        """What keys and values are kept as."""
        return self.dtype if self.cache_dtype is None else self.cache_dtype

    @property
    def has_scales(self) -> bool:
        """Whether blocks have scales."""
        return self.stored_dtype == FLOAT8

    @property
    def page_size(self) -> int:
        """Elements of one block's keys, or values, in one layer."""
        return self.num_kv_heads * self.head_dim * self.block_size


def block_bytes(shapes: Sequence[CacheShape]) -> int:
    """Return the bytes of a block over all layers of a group: keys and values, with their scales."""
    num_slots = max(len(shape.layers) for shape in shapes)
    page_size, num_scales = _largest_page(shapes)
    return 2 * num_slots * (page_size * shapes[0].stored_dtype.itemsize + num_scales * torch.float32.itemsize)


def _largest_page(shapes: Sequence[CacheShape]) -> tuple[int, int]:
    """Elements, and scales, of the largest group's keys, or values, of a block in one layer."""
    return max(shape.page_size for shape in shapes), max(shape.has_scales * shape.num_kv_heads for shape in shapes)


class LayerCache(NamedTuple):
    """One layer's cache."""

    keys: Tensor
    """(num_blocks, num_kv_heads, block_size, head_dim); a block is contiguous."""
    values: Tensor
    """As `keys`."""


class LayerScales(NamedTuple):
    """The scales of one layer's cache: an element stands for itself times its block's and head's."""

    keys: Tensor
    """(num_blocks, num_kv_heads) float32, rows as far apart as those of the group with most heads."""
    values: Tensor
    """As `keys`."""


class KVStore:
    """Owns the cache. KV groups share its blocks: layer i of each group lies in the same storage, whose pages are as
    large as the largest group's, and which each group views in its own shape from the page's beginning.

    A slot is written before any query reads it. What has not been written is undefined and may be NaN.
    """

    def __init__(self, shapes: Sequence[CacheShape], device: torch.device) -> None:
        """Raise ValueError for groups whose dtypes differ.

        Args:
            shapes: of each KV group.
            device: where the cache lies.
        """
        dtypes = {(shape.dtype, shape.cache_dtype) for shape in shapes}
        if len(dtypes) != 1:
            raise ValueError(f"KV groups: given dtypes {dtypes}, expected one")
        self.shapes = tuple(shapes)
        self.group_of = {layer: group for group, shape in enumerate(shapes) for layer in shape.layers}
        """Of each layer the index of its KV group."""
        self.dtype, self.stored_dtype = shapes[0].dtype, shapes[0].stored_dtype
        self.has_scales = shapes[0].has_scales
        self.device = device
        self.layers: dict[int, LayerCache] = {}
        self.scales: dict[int, LayerScales] = {}
        """Of each layer, where there are scales."""
        self.parts: tuple[Tensor, ...] = ()
        """What a block consists of, (2, layers of the largest group, num_blocks, ...) each: elements of keys and
        values, and their scales, if any. With `attach` those of the other store follow."""
        self._attached: KVStore | None = None

    def attach(self, other: KVStore) -> None:
        """Let each block have a page of another store too, a draft model's: both are allocated, copied and kept in host
        memory as one. Before `allocate`."""
        self._attached = other

    @property
    def num_slots(self) -> int:
        """Layers of the largest group."""
        return max(len(shape.layers) for shape in self.shapes)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers of a group, keys and values, and of its page in an attached store."""
        return block_bytes(self.shapes) + (0 if self._attached is None else self._attached.block_bytes)

    @property
    def cache(self) -> Tensor:
        """(2, layers of the largest group, num_blocks, elements of a page): keys, then values; bytes of float8."""
        return self.parts[0]

    def allocate(self, num_blocks: int) -> None:
        """Allocate the cache of all layers; its content is undefined."""
        page_size, num_scales = _largest_page(self.shapes)
        size = (2, self.num_slots, num_blocks)
        elements = self._allocate((*size, page_size), torch.uint8 if self.has_scales else self.stored_dtype)
        self.parts = (elements,)
        if self.has_scales:
            self.parts = (elements, self._allocate((*size, num_scales), torch.float32))
        for shape in self.shapes:
            for slot, layer in enumerate(shape.layers):
                keys, values = (half[slot, :, : shape.page_size].view(self.stored_dtype) for half in elements)
                block = (num_blocks, shape.num_kv_heads, shape.block_size, shape.head_dim)
                self.layers[layer] = LayerCache(keys.view(block), self._view_values(values, shape))
                if self.has_scales:
                    self.scales[layer] = LayerScales(*(half[slot, :, : shape.num_kv_heads] for half in self.parts[-1]))
        if self._attached is not None:
            self._attached.allocate(num_blocks)
            self.parts += self._attached.parts

    def release(self) -> None:
        """Free the cache of all layers, until `allocate`."""
        self.layers.clear()
        self.scales.clear()
        self.parts = ()
        if self._attached is not None:
            self._attached.release()

    def _view_values(self, pages: Tensor, shape: CacheShape) -> Tensor:
        """View (num_blocks, page_size) as `LayerCache.values`."""
        return pages.view(len(pages), shape.num_kv_heads, shape.block_size, shape.head_dim)

    def _allocate(self, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if self.device.type == "cpu":
            return host_tensor(size, dtype)
        # Undefined until written, maybe NaN, and 0 * NaN is NaN: attention must not read what no query sees.
        return torch.empty(size, dtype=dtype, device=self.device)

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy keys and values of blocks in all layers: pairs of source and target, no target twice.

        All sources are read before a target is written.
        """
        sources, targets = to_device(torch.tensor(copies), self.device).unbind(1)
        for part in self.parts:
            part.index_copy_(2, targets, part.index_select(2, sources))

    def write(self, layer: int, key: Tensor, value: Tensor, slots: Tensor) -> None:
        """Write keys and values of a layer.

        Where there are scales, a step's tokens of one block are neighbours, in slots that follow each other, and the
        tokens of a block are written from its first slot on: that one takes the block anew.

        Args:
            key: (tokens, num_kv_heads, head_dim).
            value: as `key`.
            slots: (tokens,) int64: block * block_size + offset.
        """
        cache = self.layers[layer]
        if self.has_scales:
            for pages, scales, rows in zip(cache, self.scales[layer], (key, value), strict=True):
                write_scaled(pages, scales, rows, slots)
            return
        size = cache.keys.shape[2]
        blocks, offsets = slots // size, slots % size
        cache.keys[blocks, :, offsets] = key.to(self.stored_dtype)
        cache.values[blocks, :, offsets] = value.to(self.stored_dtype)

    def gather(self, layer: int, blocks: Tensor) -> LayerCache:
        """Copy blocks of a layer, (used,) int64, to tensors of `dtype`: their first dimension is `used`."""
        cache = self.layers[layer]
        if self.has_scales:
            pairs = zip(cache, self.scales[layer], strict=True)
            return LayerCache(*(dequantised(pages, scales, blocks).to(self.dtype) for pages, scales in pairs))
        return LayerCache(*(pages.index_select(0, blocks).to(self.dtype) for pages in cache))

    def rotates(self, rotation: Rotation, head_dim: int, norm: HeadNorm | None) -> bool:
        """Whether `rotate_and_write` is available for a rotation of heads of a size, with a norm before it."""
        return False

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
        """Norm and rotate query and key, and write key and value, in one pass over them.

        Args:
            query: (tokens, num_heads, head_dim), overwritten.
            key: (tokens, num_kv_heads, head_dim).
            value: as `key`.
            slots: (tokens,) int64.
            angles: of a rotation that this store `rotates`.
            norm: before the rotation, or None.

        Returns:
            The rotated query, in its own storage where its layout allows.
        """
        raise NotImplementedError("this store does not rotate")


def host_tensor(size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor whose pages come into being when they are first touched, in 2 MiB pages where Linux has them.

    A decode step reads blocks from all over the pool: with 4 KiB pages it took 29 ms, with large ones 21 (64 sequences
    of the reference workload, one core of an EPYC with AVX-512), the difference being address translation.
    """
    num_bytes = math.prod(size) * dtype.itemsize
    # Private: a shared mapping, which is Python's default, gets large pages only where the system is told so.
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # A kernel built without them refuses: small pages do.
        with suppress(OSError):
            pages.madvise(mmap.MADV_HUGEPAGE)
    # The tensor keeps the mapping alive, and its end unmaps it.
    return torch.frombuffer(pages, dtype=dtype).view(size)


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
    slopes: Tensor | None = None
    """(num_heads,) float32: what a score of each head loses with every token between query and key, after the soft cap
    (ALiBi, Press et al. 2021, arXiv:2108.12409)."""
    rounds_slopes: bool = False
    """Whether a score gains its slope with every token before the key instead, and that is rounded to bfloat16, with
    which a model was trained (Falcon RW)."""


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
            ValueError: no backend can: its sinks or slopes are not as `AttentionSpec` says.
        """
        for name, given in (("sinks", spec.sinks), ("slopes", spec.slopes)):
            if given is None:
                continue
            if given.dtype != torch.float32 or given.shape != (spec.num_heads,) or not given.is_contiguous():
                raise ValueError(
                    f"{name}: given {given.dtype} of shape {tuple(given.shape)} and strides {given.stride()}, expected "
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


def _none() -> int:
    return 0


@dataclass(frozen=True, slots=True, eq=False)
class Backend:
    """KV store, attention and operators that belong together."""

    name: str
    store: KVStore
    attention: Attention[Any]
    operators: Operators
    kernel_version: str = ""
    """Name of the build that computes beside torch; another one may give other bits. Empty without such a build."""

    compile_errors: tuple[type[Exception], ...] = ()
    """What is raised where a kernel can't be compiled for the device: each attempt ends so."""

    num_compilations: Callable[[], int] = _none
    """Kernels that were compiled in this process so far."""

    @property
    def compiles(self) -> bool:
        """Whether a kernel is compiled when it is first launched."""
        return self.num_compilations is not _none

    @property
    def is_deterministic(self) -> bool:
        """Whether a token's results have the same bits in any batch, in any chunk, and whenever they are computed
        again. With scales a block's later tokens may change what an earlier one is rounded to."""
        return self.attention.is_deterministic and not self.store.has_scales

    def prepare_step(self, batches: Sequence[AttentionBatch]) -> StepContext:
        """Prepare a step; `batches` has one entry for each KV group, all of the same tokens."""
        pairs = zip(batches, self.store.shapes, strict=True)
        return StepContext(
            positions=batches[0].positions,
            slots=tuple(batch.slots for batch in batches),
            metadata=tuple(self.attention.prepare(batch, shape.block_size) for batch, shape in pairs),
        )

    def prepare_decodes(self, batches: Sequence[DecodeBatch]) -> StepContext:
        """Prepare a step of decodes from what is on the device; see `DecodeBatch`."""
        pairs = zip(batches, self.store.shapes, strict=True)
        return StepContext(
            positions=batches[0].positions,
            slots=tuple(batch.slots for batch in batches),
            metadata=tuple(self.attention.prepare_decodes(batch, shape.block_size) for batch, shape in pairs),
        )


class PagedAttention:
    """Writes a layer's keys and values to the cache, and attends.

    Heads of query and key, or of value, may be smaller than the cache's: they are filled up with zeros, which change no
    score and no result.
    """

    __slots__ = ("_backend", "_group", "layer", "spec")

    def __init__(self, backend: Backend, layer: int, spec: AttentionSpec) -> None:
        """Raise ConfigError for a layer that the backend can't run.

        Args:
            backend: whose cache and attention are used.
            layer: index of the layer in the cache.
        """
        backend.attention.check(spec)
        self._backend = backend
        self._group = backend.store.group_of[layer]
        self.layer = layer
        self.spec = spec

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        context: StepContext,
        angles: Angles | None = None,
        *,
        norm: HeadNorm | None = None,
    ) -> Tensor:
        """Attend to everything that the query tokens see, these tokens included.

        Args:
            query: (tokens, num_heads, head size), may be overwritten.
            key: (tokens, num_kv_heads, head size of the query), may be overwritten.
            value: (tokens, num_kv_heads, its own head size).
            angles: by which query and key are to be rotated; None where they are already, or never.
            norm: of query and key, before they are rotated.

        Returns:
            (tokens, num_heads * head size of the value), in the packed order.
        """
        spec, value_dim = self.spec, value.shape[2]
        store, operators = self._backend.store, self._backend.operators
        slots = context.slots[self._group]
        is_whole = key.shape[2] == spec.head_dim
        if angles is not None and is_whole and store.rotates(angles.rotation, spec.head_dim, norm):
            if value_dim != spec.head_dim:
                value = _filled(value, spec.head_dim)
            query = store.rotate_and_write(self.layer, query, key, value, slots=slots, angles=angles, norm=norm)
        else:
            if norm is not None:
                query = operators.rms_norm(query, norm.query_weight, norm.eps)
                key = operators.rms_norm(key, norm.key_weight, norm.eps)
            if angles is not None:
                query, key = operators.rotate(query, key, angles)
            query, key = _filled(query, spec.head_dim), _filled(key, spec.head_dim)
            store.write(self.layer, key, _filled(value, spec.head_dim), slots)
        output = self._backend.attention.attend(self.layer, query, spec, context.metadata[self._group])
        if value_dim == spec.head_dim:
            return output
        return output.view(len(output), -1, spec.head_dim)[..., :value_dim].flatten(1)


def _filled(x: Tensor, head_dim: int) -> Tensor:
    """(tokens, heads, head size) -> (tokens, heads, head_dim)."""
    missing = head_dim - x.shape[2]
    return F.pad(x, (0, missing)) if missing else x
