"""A model's parameters in a file that all engines of a machine map, in the layout by which the CPU's kernels read them.

A file holds the bytes of tensors, each from a multiple of 64, then a JSON object `{name: [dtype, shape, begin]}`, its
SHA-256, its length, and a magic number: a file that is cut off is no such file. It is written under another name,
renamed, and never changed. The folder is the user's own. One process writes at a time, the others wait for it; a
process that maps a file holds a shared lock on it, and an unlocked one may be removed for want of room.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import mmap
import os
import shutil
import struct
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from pagestream_engine.native_build import check_private, user_cache

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
