"""Compiles the C++ kernels for this machine at first use, and keeps the result in the user's cache folder.

Compiled here rather than in the wheel, the code may use every instruction of the very CPU it runs on, for the very head
size of the model; it takes about a second, once. An image without a compiler brings libraries that were compiled
beforehand (`levels.py`). Without either the engine runs on torch's operations, slower.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from pagestream_engine.attention.native.levels import find_prebuilt
from pagestream_engine.cpu import processor_identity, read_cpuinfo

SOURCE = Path(__file__).parent / "kernels.cpp"
HEAD_DIM_MULTIPLE = 16
_FLAGS = ("-O3", "-std=c++17", "-fopenmp", "-shared", "-fPIC", "-Wno-psabi")
_COMPILERS = ("c++", "g++", "clang++")
_COMPILE_LIMIT_S = 120.0

_log = logging.getLogger(__name__)


@cache
def load_library(head_dim: int) -> ctypes.CDLL | None:
    """The library for a head size, compiled if need be; None (and one warning) where that is impossible."""
    if head_dim % HEAD_DIM_MULTIPLE:
        return None
    prebuilt, compiler = find_prebuilt(head_dim), find_compiler()
    if prebuilt is None and compiler is None:
        _log.warning("no C++ compiler on the PATH: attention runs on torch's operations, several times slower")
        return None
    try:
        # Torch is loaded by now, so that the OpenMP runtime that this resolves to is torch's own: one pool of threads.
        return ctypes.CDLL(str(prebuilt or compiled(str(compiler), head_dim, _cache_folder())))
    except (OSError, subprocess.SubprocessError) as error:
        detail = error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else error
        _log.warning("the C++ kernels can't be used, attention runs on torch's operations: %s", detail)
        return None


def find_compiler() -> str | None:
    """The path of a C++ compiler; `CXX` names another."""
    names = (os.environ["CXX"], *_COMPILERS) if os.environ.get("CXX") else _COMPILERS
    return next(filter(None, map(shutil.which, names)), None)


def compiled(compiler: str, head_dim: int, folder: Path) -> Path:
    """The compiled library in `folder`; made if it isn't there. Any number of processes may do this at once.

    Raises:
        subprocess.SubprocessError: the compiler failed, or took longer than its limit.
        OSError: the folder can't be written, or is open to other users.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_private(folder)
    flags = _flags(head_dim, "native")
    fingerprint = _fingerprint(compiler, flags, platform.machine().encode(), processor_identity(read_cpuinfo()))
    target = folder / f"kernels-{head_dim}-{fingerprint}.so"
    return target if target.is_file() else _compile(compiler, flags, target)


def compile_for(compiler: str, head_dim: int, level: str, folder: Path) -> Path:
    """The library for all processors of a level of instructions, whatever this one is; made in `folder`.

    Raises:
        subprocess.SubprocessError: the compiler failed, or took longer than its limit.
        OSError: the folder can't be written.
    """
    flags = _flags(head_dim, level)
    return _compile(compiler, flags, folder / f"kernels-{head_dim}-{level}-{_fingerprint(compiler, flags)}.so")


def _flags(head_dim: int, level: str) -> list[str]:
    return [*_FLAGS, f"-march={level}", f"-DPAGESTREAM_HEAD_DIM={head_dim}"]


def _compile(compiler: str, flags: list[str], target: Path) -> Path:
    with tempfile.TemporaryDirectory(dir=target.parent) as name:
        made = Path(name) / target.name
        command = [compiler, *flags, "-o", str(made), str(SOURCE)]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_COMPILE_LIMIT_S)
        made.replace(target)
    return target


def _fingerprint(compiler: str, flags: list[str], *machine: bytes) -> str:
    """Of all that the machine code depends on: a cache folder may be shared by unlike machines."""
    version = subprocess.run([compiler, "--version"], check=True, capture_output=True, timeout=_COMPILE_LIMIT_S).stdout
    parts = [SOURCE.read_bytes(), " ".join(flags).encode(), version, *machine]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "pagestream" / "native"


def _check_private(folder: Path) -> None:
    """What is loaded from here runs as this user, so nobody else may write here."""
    status = folder.stat()
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise PermissionError(f"{folder} must belong to this user, and be writable by nobody else")
