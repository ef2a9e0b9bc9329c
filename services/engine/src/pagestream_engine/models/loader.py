"""From a family's weight mapping to loaded parameters: each tensor is read once, into the place where it stays.

With `shared_weights_gb` that is a file that all engines of a machine map, in the layout by which the CPU's kernels read
them. Such a file holds the bytes of tensors, each from a multiple of 64, then a JSON object `{name: [dtype, shape,
begin]}`, its SHA-256, its length, and a magic number: a file that is cut off is no such file. It is written under
another name, renamed, and never changed. The folder is the user's own. One process writes at a time, the others wait
for it; a process that maps a file holds a shared lock on it, and an unlocked one may be removed for want of room.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import mmap
import os
import shutil
import struct
import tempfile
import time
import warnings
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from math import ceil, prod
from pathlib import Path
from typing import BinaryIO, NamedTuple

import torch
from torch import Tensor

from pagestream_engine.errors import DOWNLOAD_AGAIN, InvariantViolation, NativeBuildError, WeightsError
from pagestream_engine.layers.linear import (
    Linear,
    LinearMethod,
    choose_method,
    kernel_build,
    lays_out_anew,
    panels_of,
    runs_experts_natively,
)
from pagestream_engine.layers.quantised import (
    QuantisedWeight,
    choose_quantised_method,
    from_parts,
    parts_of,
    quantise_int8,
)
from pagestream_engine.models.division.staging import part_names
from pagestream_engine.models.folder import model_revision
from pagestream_engine.models.model import Target
from pagestream_engine.models.nested import text_tensors
from pagestream_engine.models.offload import OffloadedWeights, plan_offload
from pagestream_engine.models.quantised.scheme import Scheme
from pagestream_engine.models.quantised.tensors import read_quantised
from pagestream_engine.models.safetensors_file import Entry, FileCache, open_files, read_folder
from pagestream_engine.models.weights import (
    EXPERT,
    LinearWeight,
    Parameters,
    Part,
    TensorWeight,
    TiedWeight,
    Weight,
    WeightMap,
)
from pagestream_engine.native_build import check_private, user_cache

_IGNORED_SUFFIXES = (
    *(".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias", ".attn.causal_mask", ".attn.attention.bias"),
    *(".attn.attention.masked_bias", ".embed_positions.weights"),
    *(".k_scale", ".v_scale", ".q_scale", ".prob_scale"),
)
"""Old checkpoints hold what is computed, masks among it; some hold scales of a cache of 8 bits, whose entries have
their own here."""
_COPIED_HEAD_BYTES = 16 << 20
"""Largest tied head of which a copy is packed: memory for speed."""
_BIAS = ".bias"
_PREFIXES, _HEADS = (
    ("model.", "transformer.", "biogpt.", "gpt_neox_japanese."),
    ("lm_head.", "output_projection.", "embed_out."),
)

_log = logging.getLogger(__name__)


def load_parameters(
    folder: Path,
    weights: WeightMap,
    target: Target,
    scheme: Scheme | None = None,
    *,
    whole: WeightMap | None = None,
    is_nested: bool = False,
) -> Parameters:
    """Read the weights of `folder` in the dtype and onto the device of `target`.

    At its peak it needs the model's size, and the largest matrix once more where matrices are laid out anew. With
    `Target.shared_bytes` the model's size is that of a file whose pages all engines of the machine share.

    Args:
        weights: what is read.
        target: what for.
        scheme: how linears are quantised there; None: they are not.
        whole: of the model, where other stages read some of it; None: `weights`.
        is_nested: whether the folder has more than a language model, of which this is the weights.

    Raises:
        ConfigError: an option does not go with weights that are quantised already, or what is offloaded would free no
            memory.
        ModelFileError: a file is missing or malformed.
        WeightsError: a tensor is missing, unexpected, or mis-shaped.
        UnsupportedModel: quantised weights are in a form that has no reader.
    """
    names = _Names(weights if whole is None else whole, is_nested)
    if scheme is not None:
        scheme.check_options(target.quantization, offloads=target.offload is not None)
    if target.offload is not None:
        pinned = target.device.type == "cuda"
        plan = plan_offload(weights, target.dtype, target.offload.max_bytes, pinned=pinned)
        offloaded = OffloadedWeights(plan, target.dtype, target.device, target.offload.copier)
        _log.info("%d layers' weights are in %d MiB of host memory", len(plan.pages), offloaded.num_host_bytes >> 20)
        parameters = Parameters(offloaded.layers, offloaded.num_device_bytes)
        for _ in _load_each(folder, weights, target, parameters, names, scheme=scheme, offloaded=offloaded):
            pass
        return parameters
    if target.shared_bytes and can_be_shared(target):
        key = _key(folder, weights, target)
        try:
            shared = map_or_write(
                key, lambda: _laid_out(folder, weights, target, names, scheme), target.shared_bytes, weights_folder()
            )
        except (OSError, NativeBuildError) as error:
            _log.warning("the weights are in this engine's own memory, no other shares them: %s", error)
        else:
            _log.info("mapped %d MiB of weights, which this machine's engines share", shared.num_bytes >> 20)
            return _from_file(shared, weights, target)
    parameters = Parameters()
    for _ in _load_each(folder, weights, target, parameters, names, scheme=scheme):
        pass
    return parameters


class _Names(NamedTuple):
    """By which names a folder has what a family declares."""

    whole: WeightMap
    """Of the model, of which other stages may read some."""
    is_nested: bool
    """Whether the folder has more than a language model."""

    def of(self, entries: dict[str, Entry]) -> dict[str, Entry]:
        """Return a folder's tensors by the declared names: those that `AutoModel` saved lack a prefix."""
        return by_declared_names(text_tensors(entries) if self.is_nested else entries, self.whole)


def by_declared_names(entries: dict[str, Entry], weights: WeightMap) -> dict[str, Entry]:
    """Return tensors by the names that a family declares: those that `AutoModel` saved lack a prefix."""
    declared = part_names(weights)
    for prefix in _PREFIXES:
        if any(name.startswith(prefix) for name in declared):
            if any(name.startswith(prefix) for name in entries):
                return entries
            return {name if name.startswith(_HEADS) else prefix + name: entry for name, entry in entries.items()}
    return entries


def can_be_shared(target: Target) -> bool:
    """Whether weights for a target consist of memory that may lie anywhere: panels of the C++ kernels do, oneDNN's own
    layouts do not."""
    is_exact = target.exact_linears and not target.by_triton
    return target.device.type == "cpu" and is_exact and bool(kernel_build(target.dtype))


def _load_each(
    folder: Path,
    weights: WeightMap,
    target: Target,
    parameters: Parameters,
    names: _Names,
    *,
    scheme: Scheme | None,
    offloaded: OffloadedWeights | None = None,
) -> Iterator[str]:
    """Read a folder's weights into `parameters`, and those of some layers into host memory; yield the name of each that
    is there."""
    whole = names.whole
    entries = names.of(read_folder(folder))
    with open_files() as files:
        reader = WeightReader(entries, files, target, scheme)
        if lays_out_anew(target.device.type, target.dtype, exact=target.exact_linears, by_triton=target.by_triton):
            reader.reserve(weights.values())
        for name, weight in weights.items():
            if offloaded is not None and isinstance(weight, LinearWeight) and name in offloaded:
                _load_offloaded(parameters, name, weight, reader, offloaded)
            else:
                _load_one(parameters, name, weight, reader)
            yield name
        is_tied = any(isinstance(weight, TiedWeight) for weight in whole.values())
        reader.check_all_used(part_names(whole) - part_names(weights), tied=is_tied)
        if scheme is not None and not reader.num_quantised:
            raise WeightsError(
                f"weights: given floats alone, expected some that are quantised by {scheme.method}, as config.json says"
            )


def _laid_out(
    folder: Path, weights: WeightMap, target: Target, names: _Names, scheme: Scheme | None
) -> Iterator[tuple[str, Tensor]]:
    """Read a folder's weights; yield each by its name, with what `_from_file` makes a linear of."""
    parameters = Parameters()
    for name in _load_each(folder, weights, target, parameters, names, scheme=scheme):
        if isinstance(weights[name], TensorWeight):
            yield name, parameters.tensor(name)
            continue
        linear = parameters.drop_linear(name)
        panels = panels_of(linear.method)
        if panels is not None:
            yield name, panels
        for part, tensor in parts_of(linear.method).items():
            yield name + part, tensor
        if linear.bias is not None:
            yield name + _BIAS, linear.bias


def _from_file(shared: SharedWeights, weights: WeightMap, target: Target) -> Parameters:
    parameters = Parameters()
    for name, weight in weights.items():
        found = shared.tensor(name)
        match weight:
            case TensorWeight():
                parameters.add_tensor(name, _found(found, name))
            case LinearWeight():
                shape = (weight.num_rows, weight.in_features)
                method = from_parts(partial(_part, shared, name), shape, target.dtype)
                if method is None:
                    like = torch.empty(shape, dtype=target.dtype, device="meta")
                    method = choose_method(like, exact=True, packed=_found(found, name))
                bias = _found(shared.tensor(name + _BIAS), name + _BIAS) if weight.bias else None
                parameters.add_linear(name, Linear(method, bias))
            case TiedWeight():
                matrix = weight.of(parameters.tensor(weight.to))
                method = choose_method(matrix, exact=True, may_copy=found is not None, packed=found)
                parameters.add_linear(name, Linear(method), is_shared=not method.is_copy)
    return parameters


def _part(shared: SharedWeights, name: str, part: str) -> Tensor | None:
    return shared.tensor(name + part)


def _found(tensor: Tensor | None, name: str) -> Tensor:
    if tensor is None:
        raise InvariantViolation(f"shared weights: given none of {name}")
    return tensor


def _key(folder: Path, weights: WeightMap, target: Target) -> str:
    """A digest of all that decides the bytes: the files, by content and identity, and how they are laid out."""
    files = [(path, path.stat()) for path in sorted(folder.glob("*.safetensors"))]
    parts = [
        model_revision(folder),
        *(f"{path.resolve()} {status.st_size} {status.st_mtime_ns} {status.st_ino}" for path, status in files),
        repr(sorted(weights.items())),
        f"{target.dtype} {target.exact_linears} {target.quantization}",
        kernel_build(target.dtype),
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


class Columns(NamedTuple):
    """Which columns of a matrix in a file are read, as many as there is room for."""

    first: int
    of: int
    """Columns of the matrix."""


class WeightReader:
    """Hands out tensors by name, and remembers which were asked for."""

    def __init__(
        self, entries: dict[str, Entry], files: FileCache, target: Target, scheme: Scheme | None = None
    ) -> None:
        self._entries = entries
        self._files = files
        self.target = target
        self.scheme = scheme
        self.num_quantised = 0
        """Linears that were read quantised."""
        self._used: set[str] = set()
        self._scratch: Tensor | None = None

    def reserve(self, weights: Iterable[Weight]) -> None:
        """Let all matrices be read into the same memory, of the largest one's size: each is copied before the next.

        Freed one by one they would leave holes among the copies, 60 MiB in a model of 536 MiB (glibc).
        """
        linears = [weight for weight in weights if isinstance(weight, LinearWeight)]
        if self.target.quantization is not None:  # scales are those of whole rows
            linears = [weight.with_all_columns() for weight in linears]
        sizes = [weight.num_rows * weight.in_features for weight in linears]
        self._scratch = torch.empty(max(sizes, default=0), dtype=self.target.dtype, device=self.target.device)

    def matrix(self, weight: LinearWeight) -> Tensor:
        """Read the (rows, in features) of a linear; after `reserve` they stay until the next call only."""
        shape = weight.num_rows, weight.in_features
        if self._scratch is None:
            target = torch.empty(*shape, dtype=self.target.dtype, device=self.target.device)
        else:
            target = self._scratch[: shape[0] * shape[1]].view(shape)
        columns = None if weight.all_columns is None else Columns(weight.first_column, weight.all_columns)
        self.fill(target, weight.parts, ".weight", columns)
        return target

    def read(self, parts: Sequence[Part], *trailing: int, suffix: str = "") -> Tensor:
        """Stack tensors along their first dimension.

        Args:
            parts: in order.
            trailing: the other dimensions, the same for all.

        Returns:
            (sum of the rows, *trailing).
        """
        target = torch.empty(
            sum(part.rows for part in parts), *trailing, dtype=self.target.dtype, device=self.target.device
        )
        self.fill(target, parts, suffix)
        return target

    def quantised(self, weight: LinearWeight) -> QuantisedWeight | None:
        """Read a linear from a quantised checkpoint; None where it is stored in floats."""
        if self.scheme is None:
            return None
        found = read_quantised(self, self.scheme, weight, self.target.device)
        self.num_quantised += found is not None
        return found

    def has(self, name: str) -> bool:
        """Whether there is such a tensor."""
        return name in self._entries

    def dtype_of(self, name: str) -> torch.dtype | None:
        """Return a tensor's dtype as stored; None where there is no such tensor."""
        entry = self._entries.get(name)
        return None if entry is None else entry.dtype

    def raw(self, name: str) -> Tensor:
        """Read a tensor as it is stored, on the CPU.

        Raises:
            WeightsError: there is none.
        """
        entry = self._entries.get(name)
        if entry is None:
            raise WeightsError(f"{name}: missing, expected among the quantised weights; {DOWNLOAD_AGAIN}")
        tensor = torch.empty(entry.shape, dtype=entry.dtype)
        self._files.read(entry, tensor)
        self._used.add(name)
        return tensor

    def check_all_used(self, elsewhere: Container[str], *, tied: bool) -> None:
        """Raise WeightsError if the files hold a tensor that no part of the model took.

        Args:
            elsewhere: names of parts that other stages take.
            tied: whether the head is the embedding.
        """
        allowed = {f"{head}weight" for head in _HEADS} if tied else set()
        left = [name for name in self._entries if name not in self._used | allowed]
        left = [name for name in left if name not in elsewhere and name.rpartition(".")[0] not in elsewhere]
        left = sorted(name for name in left if not name.endswith(_IGNORED_SUFFIXES))
        if left:
            raise WeightsError(
                f"weights: given {len(left)} tensors that the architecture does not have ({', '.join(left[:5])}), "
                "expected none; check that config.json belongs to these weights"
            )

    def fill(self, target: Tensor, parts: Sequence[Part], suffix: str, columns: Columns | None = None) -> None:
        """Do `read` into a tensor of the result's shape; with `columns` only these of each matrix."""
        begin = 0
        for part in parts:
            self._read_one(target[begin : begin + part.rows], part, part.name + suffix, columns)
            begin += part.rows

    def _read_one(self, target: Tensor, part: Part, name: str, columns: Columns | None) -> None:
        expected = (part.all_rows or part.rows, *target.shape[1:])
        if columns is not None:
            expected = (expected[0], columns.of)
        entry = self._entries.get(name)
        if entry is None:
            raise WeightsError(f"{name}: missing, expected among the weights with shape {expected}; {DOWNLOAD_AGAIN}")
        if entry.shape != expected:
            raise WeightsError(f"{name}: given shape {entry.shape}, expected {expected} by config.json")
        if not entry.is_plain:
            raise WeightsError(
                f"{name}: given {entry.dtype}, expected floats of 16 bits or more: config.json has no "
                "quantization_config for it"
            )
        rows = entry.rows(part.first_row, part.rows)
        if columns is None:
            self._files.read(rows, target)
        else:
            for index, row in enumerate(target):
                self._files.read(rows.row_part(index, columns.first, len(row)), row)
        self._used.add(name)


def _load_offloaded(
    parameters: Parameters, name: str, weight: LinearWeight, reader: WeightReader, offloaded: OffloadedWeights
) -> None:
    """Read a matrix into host memory; what computes with it sees its place on the device, and copies none of it."""
    reader.fill(offloaded.host_matrix(name, weight), weight.parts, ".weight")
    target = reader.target
    in_buffer = offloaded.device_matrix(name, weight)
    method = choose_method(in_buffer, exact=target.exact_linears, by_triton=target.by_triton, may_copy=False)
    bias = reader.read(weight.parts, suffix=".bias") if weight.bias else None
    parameters.add_linear(name, Linear(method, bias), is_shared=True)


def _load_one(parameters: Parameters, name: str, weight: Weight, reader: WeightReader) -> None:
    exact, by_triton = reader.target.exact_linears, reader.target.by_triton
    match weight:
        case TensorWeight():
            parameters.add_tensor(name, reader.read(weight.parts, *weight.trailing))
        case LinearWeight():
            method = _method_of(name, weight, reader)
            bias = reader.read(weight.parts, suffix=".bias") if weight.bias else None
            parameters.add_linear(name, Linear(method, bias))
        case TiedWeight():
            matrix = weight.of(parameters.tensor(weight.to))
            # The plain layout is needed too, and another one is a second copy: made only of a small matrix.
            may_copy = matrix.nbytes <= _COPIED_HEAD_BYTES
            method = choose_method(matrix, exact=exact, by_triton=by_triton, may_copy=may_copy)
            parameters.add_linear(name, Linear(method), is_shared=not method.is_copy)


def _method_of(name: str, weight: LinearWeight, reader: WeightReader) -> LinearMethod:
    target = reader.target
    natively = EXPERT in name and not target.by_triton and runs_experts_natively(target.device, target.dtype)
    exact = target.exact_linears or natively
    quantised = reader.quantised(weight)
    if quantised is None:
        if target.quantization is None or weight.is_sensitive:
            return choose_method(reader.matrix(weight), exact=exact, by_triton=target.by_triton)
        quantised = quantise_int8(reader.matrix(weight.with_all_columns()), weight.columns)
    return choose_quantised_method(quantised, target.dtype, exact=target.exact_linears, by_triton=target.by_triton)


_SCALE_BYTES = 4
"""Of an output, or a group of its inputs."""


def stored_bytes(
    weights: WeightMap,
    dtype: torch.dtype,
    quantization: str | None,
    scheme: Scheme | None = None,
    *,
    on_cpu: bool = False,
) -> int:
    """Return the bytes of all parameters; a tied one counts once.

    Of a quantised checkpoint all linears but head and routers are counted as quantised, as its tools leave them.

    Args:
        quantization: `ModelConfig.quantization`.
        on_cpu: whether they lie in a CPU's memory, whose kernels read values of 4 bits; others have a byte each.
    """
    if scheme is not None:
        is_packed = on_cpu and dtype in _PACKED_DTYPES
        return sum(
            _checkpoint_bytes(weight, dtype, scheme if name != "head" else None, is_packed=is_packed)
            for name, weight in weights.items()
        )
    return sum(_bytes_of(weight, dtype, quantization) for weight in weights.values())


def num_elements(weight: Weight) -> int:
    """Return the elements of a parameter; none of a tied one, which counts where it belongs."""
    if isinstance(weight, LinearWeight):
        return weight.num_rows * (weight.in_features + weight.bias)
    if isinstance(weight, TensorWeight):
        return sum(part.rows for part in weight.parts) * prod(weight.trailing)
    return 0


_PACKED_DTYPES = (torch.float32, torch.bfloat16)
"""Of models whose quantised weights a CPU's kernels read."""
_TABLE_BYTES = 2
"""Of an output: a panel of 32 has a table of 16 numbers in float32."""
_FACTOR_BYTES = 4
_ORDER_BYTES = 8


def _checkpoint_bytes(weight: Weight, dtype: torch.dtype, scheme: Scheme | None, *, is_packed: bool) -> int:
    """Return the bytes of a parameter of a quantised checkpoint; a plain one where `scheme` is None."""
    if scheme is None or not isinstance(weight, LinearWeight) or weight.is_sensitive:
        return num_elements(weight) * dtype.itemsize
    inputs = weight.in_features
    of_values = inputs * scheme.bits // 8 if is_packed else inputs
    of_groups = ceil(inputs / (scheme.group_size or inputs)) * (scheme.scale_bytes + scheme.has_zeros)
    of_output = of_values + of_groups + weight.bias * dtype.itemsize
    of_output += _TABLE_BYTES * (scheme.has_table and is_packed) + _FACTOR_BYTES * scheme.has_factors
    return weight.num_rows * of_output + _ORDER_BYTES * inputs * scheme.has_order


def _bytes_of(weight: Weight, dtype: torch.dtype, quantization: str | None) -> int:
    if isinstance(weight, LinearWeight) and quantization == "int8" and not weight.is_sensitive:
        return weight.num_rows * (weight.in_features + _SCALE_BYTES + weight.bias * dtype.itemsize)
    return num_elements(weight) * dtype.itemsize


_MAGIC = b"pagestream weights 1\n"
_END = struct.Struct("<32sQ")
_ALIGNMENT = 64
_SUFFIX = ".weights"
_UNUSED_S = 30 * 24 * 3600.0
"""After which an unlocked file is removed whenever another is written."""
_DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.int32)}

Named = tuple[str, Tensor]


class SharedWeights:
    """A file of tensors, mapped to be read. It stays locked, and the mapping stays, as long as the tensors do."""

    def __init__(self, path: Path) -> None:
        """Map a file.

        Raises:
            OSError: there is none, or it is not whole.
        """
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH)  # for as long as the mapping, which has the file open, too
            try:
                self._entries = _read_entries(file)
            except ValueError as error:
                raise OSError(f"{path}: {error}") from error
            self._pages = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        os.utime(path)
        self.num_bytes = len(self._pages)

    def tensor(self, name: str) -> Tensor | None:
        """Return a tensor that is not to be written; None where the file has none of this name."""
        if name not in self._entries:
            return None
        dtype, shape, begin = self._entries[name]
        count = torch.Size(shape).numel()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
            return torch.frombuffer(self._pages, dtype=_DTYPES[dtype], count=count, offset=begin).view(shape)


def weights_folder() -> Path:
    """Return the folder of shared weights: `$XDG_CACHE_HOME/pagestream/weights`, by default below `~/.cache`."""
    return user_cache() / "weights"


def map_or_write(key: str, make: Callable[[], Iterable[Named]], max_bytes: int, folder: Path) -> SharedWeights:
    """Map the file of a key; write it before where there is none. Any number of processes may do so at once.

    Args:
        key: a digest of all that decides the bytes.
        make: makes the tensors, one after the other.
        max_bytes: of all files of the folder together.
        folder: where they are, made if need be.

    Raises:
        OSError: the folder is not this user's own, the file system is full, or the files that are in use leave no room.
    """
    path = folder / (key + _SUFFIX)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_private(folder)
    try:
        return SharedWeights(path)
    except OSError:
        pass
    with _only_writer(folder):
        try:
            return SharedWeights(path)
        except OSError:
            _write(path, make(), max_bytes)
        return SharedWeights(path)


@contextmanager
def _only_writer(folder: Path) -> Iterator[None]:
    with (folder / "lock").open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _write(path: Path, tensors: Iterable[Named], max_bytes: int) -> None:
    for left in path.parent.glob("partial-*"):  # by processes that died: this one is the only writer
        shutil.rmtree(left)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="partial-") as name:
        partial = Path(name) / path.name
        entries: dict[str, tuple[str, list[int], int]] = {}
        with partial.open("wb") as file:
            for each, tensor in tensors:
                file.write(bytes(-file.tell() % _ALIGNMENT))
                entries[each] = (str(tensor.dtype), list(tensor.shape), file.tell())
                if file.tell() + tensor.nbytes > max_bytes:
                    raise OSError(f"{path.name}: given more than the {max_bytes} bytes that all files may have")
                file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
            index = json.dumps(entries).encode()
            file.write(index + _END.pack(hashlib.sha256(index).digest(), len(index)) + _MAGIC)
            file.flush()
            os.fsync(file.fileno())
        _make_room(path.parent, max_bytes - partial.stat().st_size)
        partial.replace(path)


def _make_room(folder: Path, left: int) -> None:
    """Remove unlocked files, the longest unused ones first, until at most `left` bytes remain.

    Raises:
        OSError: those that are held have more.
    """
    found = sorted(((path.stat(), path) for path in folder.glob("*" + _SUFFIX)), key=lambda each: each[0].st_mtime)
    total, oldest = sum(status.st_size for status, _ in found), time.time() - _UNUSED_S
    for status, path in found:
        if total <= left and status.st_mtime > oldest:
            break
        with path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            path.unlink()
            total -= status.st_size
    if total > left:
        raise OSError(
            f"{folder}: {total} bytes are in use by engines, expected at most {max(0, left)} beside this model"
        )


def _read_entries(file: BinaryIO) -> dict[str, tuple[str, list[int], int]]:
    """Read the index of a file; ValueError where it is not whole."""
    tail = _END.size + len(_MAGIC)
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - tail))
    end = file.read()
    if len(end) < tail or not end.endswith(_MAGIC):
        raise ValueError("is cut off")
    digest, length = _END.unpack(end[: _END.size])
    file.seek(size - tail - length)
    index = file.read(length)
    if hashlib.sha256(index).digest() != digest:
        raise ValueError("has a damaged index")
    entries: dict[str, tuple[str, list[int], int]] = json.loads(index)
    return entries
