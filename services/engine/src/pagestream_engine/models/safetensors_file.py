"""Reading safetensors files straight into the memory where the tensors stay.

The library's own reader maps the file, so that while loading the file's pages and the parameters are both resident.
Here a tensor's bytes are read into the parameter itself, or through one small buffer when the dtype or the device
differs. Format: https://huggingface.co/docs/safetensors (8 bytes of header length, JSON header, tensors).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import torch

from pagestream_engine.errors import DOWNLOAD_AGAIN, ModelFileError, WeightsError

_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_DTYPES = {
    **_FLOATS,
    "F8_E4M3": torch.float8_e4m3fn,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I32": torch.int32,
    "I64": torch.int64,
}
_MAX_HEADER_BYTES = 100_000_000  # the library's own limit
_BUFFER_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a tensor lies in its file."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    """Of its bytes, from the file's start."""
    num_bytes: int

    @property
    def is_plain(self) -> bool:
        """Whether it holds numbers as they are, not the values of quantised ones."""
        return self.dtype in _FLOATS.values()

    def rows(self, first: int, count: int) -> Entry:
        """Return where `count` of its rows lie, one after the other."""
        of_row = math.prod(self.shape[1:]) * self.dtype.itemsize
        return replace(
            self, shape=(count, *self.shape[1:]), begin=self.begin + first * of_row, num_bytes=count * of_row
        )

    def row_part(self, row: int, first: int, count: int) -> Entry:
        """Return where `count` elements of a matrix's row lie."""
        begin = self.begin + (row * self.shape[1] + first) * self.dtype.itemsize
        return replace(self, shape=(count,), begin=begin, num_bytes=count * self.dtype.itemsize)


def read_folder(folder: Path) -> dict[str, Entry]:
    """List the tensors of a folder's `model.safetensors`, or of all the files that its index names.

    Raises:
        ModelFileError: a file is missing or malformed.
    """
    index = folder / "model.safetensors.index.json"
    single = folder / "model.safetensors"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise ModelFileError(
                f"{index}: unreadable, expected a JSON object with weight_map: {error!r}; {DOWNLOAD_AGAIN}"
            ) from error
        wrong = [name for name in names if not isinstance(name, str) or Path(name).name != name]
        if wrong:
            raise ModelFileError(f"{index}: given {wrong[0]!r}, expected names of files in the same folder")
        paths = [folder / name for name in names]
    else:
        paths = [single]
    entries: dict[str, Entry] = {}
    for path in paths:
        entries.update(read_header(path))
    return entries


@contextmanager
def open_files() -> Iterator[FileCache]:
    """Keep the files of one load open, and close them."""
    files = FileCache()
    try:
        yield files
    finally:
        files.close()


class FileCache:
    """Open files by path, and the buffer for conversions."""

    def __init__(self) -> None:
        self._files: dict[Path, BinaryIO] = {}
        self._buffer: torch.Tensor | None = None

    def read(self, entry: Entry, target: torch.Tensor) -> None:
        """Fill `target` (contiguous, of the entry's shape) from the file.

        Raises:
            ModelFileError: the file is shorter than its header says.
        """
        file = self._open(entry.path)
        file.seek(entry.begin)
        flat = target.view(-1)
        if target.dtype == entry.dtype and target.device.type == "cpu":
            _read_into(file, flat, entry)
            return
        step = _BUFFER_BYTES // entry.dtype.itemsize
        for first in range(0, flat.numel(), step):
            part = flat[first : first + step]
            staged = self._stage(part.numel(), entry.dtype)
            _read_into(file, staged, entry)
            part.copy_(staged)

    def close(self) -> None:
        """Close the files and free the buffer."""
        for file in self._files.values():
            file.close()
        self._files.clear()
        self._buffer = None

    def _open(self, path: Path) -> BinaryIO:
        if path not in self._files:
            # Unbuffered: a tensor is read in one call, into place.
            self._files[path] = path.open("rb", buffering=0)
        return self._files[path]

    def _stage(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        if self._buffer is None:
            self._buffer = torch.empty(_BUFFER_BYTES, dtype=torch.uint8)
        return self._buffer[: num_elements * dtype.itemsize].view(dtype)


def _read_into(file: BinaryIO, flat: torch.Tensor, entry: Entry) -> None:
    window = flat.view(torch.uint8).numpy().data
    while window:
        count = file.readinto(window)  # type: ignore[attr-defined]  # raw files have it; BinaryIO does not say so
        if not count:
            raise ModelFileError(f"{entry.path}: ends in the middle of a tensor, is cut off; {DOWNLOAD_AGAIN}")
        window = window[count:]


def read_header(path: Path) -> dict[str, Entry]:
    """List the tensors of one file. Raise ModelFileError if it is missing or malformed."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > min(size - 8, _MAX_HEADER_BYTES):
                raise ModelFileError(
                    f"{path}: given a header of {length} bytes in a file of {size}, expected a safetensors file; "
                    f"{DOWNLOAD_AGAIN}"
                )
            header = json.loads(file.read(length))
    except FileNotFoundError as error:
        raise ModelFileError(
            f"{path}: no such file, expected weights as safetensors; convert or download them"
        ) from error
    except (OSError, ValueError) as error:
        if isinstance(error, ModelFileError):
            raise
        raise ModelFileError(f"{path}: unreadable, expected a safetensors file: {error}; {DOWNLOAD_AGAIN}") from error
    if not isinstance(header, dict):
        raise ModelFileError(
            f"{path}: given a header that is a {type(header).__name__}, expected a JSON object; {DOWNLOAD_AGAIN}"
        )
    header.pop("__metadata__", None)
    return {name: _entry(path, name, fields, 8 + length, size) for name, fields in header.items()}


def _entry(path: Path, name: str, fields: Mapping[str, Any], data_begin: int, size: int) -> Entry:
    try:
        kind, shape, (begin, end) = fields["dtype"], tuple(fields["shape"]), fields["data_offsets"]
    except (KeyError, TypeError, ValueError) as error:
        raise ModelFileError(
            f"{path}: {name}: given {fields!r:.80}, expected dtype, shape and data_offsets; {DOWNLOAD_AGAIN}"
        ) from error
    if kind not in _DTYPES:
        raise WeightsError(f"{path}: {name}: given dtype {kind}, expected one of {', '.join(_DTYPES)}")
    dtype = _DTYPES[kind]
    if end - begin != math.prod(shape) * dtype.itemsize or begin < 0 or data_begin + end > size:
        raise ModelFileError(
            f"{path}: {name}: given bytes {begin} to {end}, expected the size of {kind} {list(shape)} within the file; "
            f"{DOWNLOAD_AGAIN}"
        )
    return Entry(path, dtype, shape, data_begin + begin, end - begin)
