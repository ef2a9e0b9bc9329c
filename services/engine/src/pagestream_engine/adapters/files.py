"""An adapter's folder: its files are checked when it is loaded, its matrices are read when a step first wants them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from pagestream_engine.adapters.modules import ModuleSlice
from pagestream_engine.adapters.settings import CONFIG_FILE, AdapterSettings, read_settings
from pagestream_engine.errors import (
    AdapterChanged,
    AdapterFileError,
    AdapterMismatch,
    ModelError,
    UnsupportedAdapter,
)
from pagestream_engine.models.safetensors_file import Entry, open_files, read_header
from pagestream_engine.request import Adapter

WEIGHTS_FILE = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_TENSOR = re.compile(r"(?P<module>.+)\.lora_(?P<matrix>[AB])\.weight")
_READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class ModuleMatrices:
    """B A of one module, as tensors or where they lie in the file."""

    a: Entry
    """(rank, in features)"""
    b: Entry
    """(out features, rank)"""
    scale: float

    @property
    def rank(self) -> int:
        """Of the product."""
        return self.a.shape[0]


@dataclass(frozen=True, slots=True)
class ModuleWeights:
    """The matrices of one module: its output gets (x a^T) b * scale."""

    a: Tensor
    """(rank, in features), contiguous."""
    b: Tensor
    """(rank, out features), contiguous: transposed, so that a rank's outputs lie side by side."""
    scale: float


def open_adapter(name: str, folder: Path, modules: Mapping[str, ModuleSlice], max_rank: int) -> Adapter:
    """Check an adapter's files against a model without reading its matrices into memory.

    Args:
        name: that requests give.
        max_rank: the largest that is allowed.

    Raises:
        AdapterFileError: a file is missing, cut off or malformed.
        AdapterMismatch: it was trained for another model.
        UnsupportedAdapter: it has something that is not supported, or too large a rank.
    """
    _check(folder, read_settings(folder), modules, max_rank)
    return Adapter(name, str(folder), _revision(folder))


def read_adapter(
    adapter: Adapter, modules: Mapping[str, ModuleSlice], dtype: torch.dtype, max_rank: int
) -> Mapping[str, ModuleWeights]:
    """Check an adapter's files against a model, and read its matrices into the CPU's memory, by module.

    Args:
        adapter: with the revision that is expected.
        max_rank: the largest that is allowed.

    Raises:
        AdapterChanged: the files are others than those of the revision.
        AdapterError: as `open_adapter`.
    """
    folder = Path(adapter.folder)
    matrices = _check(folder, read_settings(folder), modules, max_rank)
    weights: dict[str, ModuleWeights] = {}
    try:
        with open_files() as files:
            for module, each in matrices.items():
                place = modules[module]
                if not place.rows:
                    continue
                a, b = torch.empty(each.a.shape, dtype=dtype), torch.empty(each.b.shape, dtype=dtype)
                files.read(each.a, a)
                files.read(each.b, b)
                a, b = place.cut_a(a), place.cut_b(b)
                weights[module] = ModuleWeights(a, b.T.contiguous(), each.scale)
    except (OSError, ModelError) as error:
        raise AdapterFileError(f"{folder}: unreadable: {error}") from error
    found = _revision(folder)
    if found != adapter.revision:
        raise AdapterChanged(adapter.name, adapter.revision, found)
    return weights


def _check(
    folder: Path, settings: AdapterSettings, modules: Mapping[str, ModuleSlice], max_rank: int
) -> Mapping[str, ModuleMatrices]:
    """Return where the matrices of each module lie."""
    path = folder / WEIGHTS_FILE
    if not path.is_file() and (folder / "adapter_model.bin").is_file():
        raise UnsupportedAdapter(f"{folder}: given adapter_model.bin, expected {WEIGHTS_FILE}; save it as safetensors")
    try:
        entries = read_header(path)
    except ModelError as error:
        raise AdapterFileError(f"{path}: {error}") from error
    pairs: dict[str, dict[str, Entry]] = {}
    for name, entry in entries.items():
        found = _TENSOR.fullmatch(name.removeprefix(_PREFIX))
        if found is None:
            raise UnsupportedAdapter(
                f"{path}: {name}: given a tensor that is neither lora_A nor lora_B of a linear, expected no other"
            )
        pairs.setdefault(found["module"], {})[found["matrix"]] = entry
    if not pairs:
        raise AdapterFileError(f"{path}: given no tensors, expected lora_A and lora_B of at least one module")
    matrices = {module: _matrices(path, module, pair, settings, modules) for module, pair in sorted(pairs.items())}
    rank = max(each.rank for each in matrices.values())
    if rank > max_rank:
        raise UnsupportedAdapter(f"{folder}: given rank {rank}, expected at most max_lora_rank, {max_rank}; raise it")
    return matrices


def _matrices(
    path: Path, module: str, pair: Mapping[str, Entry], settings: AdapterSettings, modules: Mapping[str, ModuleSlice]
) -> ModuleMatrices:
    place = modules.get(module)
    if place is None:
        names = ", ".join(sorted({name.rpartition(".")[2] for name in modules}))
        raise AdapterMismatch(
            f"{path}: {module}: given matrices for a module that this model does not have, or that takes no adapters; "
            f"expected layers of this model, and in them {names}"
        )
    rank = settings.rank_of(module)
    rows, columns = place.shape
    expected = {"A": (rank, columns), "B": (rows, rank)}
    for matrix, shape in expected.items():
        entry = pair.get(matrix)
        if entry is None:
            raise AdapterFileError(f"{path}: {module}: given no lora_{matrix}, expected one of shape {shape}")
        if not entry.dtype.is_floating_point:
            raise UnsupportedAdapter(
                f"{path}: {module}: given lora_{matrix} of {entry.dtype}, expected floating point; save it dequantised"
            )
        if entry.shape != shape:
            raise AdapterMismatch(
                f"{path}: {module}: given lora_{matrix} of shape {entry.shape}, expected {shape} by this model and "
                f"by {CONFIG_FILE}"
            )
    return ModuleMatrices(pair["A"], pair["B"], settings.scale_of(module))


def _revision(folder: Path) -> str:
    digest = hashlib.sha256()
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        path = folder / name
        try:
            digest.update(f"{name}:{path.stat().st_size}:".encode())
            with path.open("rb") as file:
                while part := file.read(_READ_BYTES):
                    digest.update(part)
        except OSError as error:
            raise AdapterFileError(f"{path}: unreadable: {error}") from error
    return digest.hexdigest()[:32]
