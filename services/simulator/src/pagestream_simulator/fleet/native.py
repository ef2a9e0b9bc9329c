"""Compiles the fleet's C++ at first use, and keeps the library in the user's cache folder."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from pagestream_simulator.errors import CompilerMissingError

SOURCE = Path(__file__).parent / "fleet.cpp"
_FLAGS = ("-O2", "-std=c++17", "-shared", "-fPIC")
_COMPILE_LIMIT_S = 120.0


@cache
def load_library() -> ctypes.CDLL:
    """The compiled fleet.

    Raises:
        CompilerMissingError: there is no C++ compiler, or it failed.
    """
    compiler = _find_compiler()
    if compiler is None:
        raise CompilerMissingError("simulate needs a C++ compiler", hint="install g++ or clang++, or set CXX")
    try:
        return ctypes.CDLL(str(_compiled(compiler, _cache_folder())))
    except subprocess.CalledProcessError as error:
        raise CompilerMissingError(f"{compiler} failed: {error.stderr.strip()}") from error
    except (OSError, subprocess.SubprocessError) as error:
        raise CompilerMissingError(f"the simulation can't be built: {error}") from error


def _find_compiler() -> str | None:
    names = (os.environ.get("CXX", ""), "c++", "g++", "clang++")
    return next((path for name in names if name and (path := shutil.which(name))), None)


def _compiled(compiler: str, folder: Path) -> Path:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise PermissionError(f"{folder} must belong to this user, and be writable by nobody else")
    parts = (SOURCE.read_bytes(), " ".join((compiler, platform.machine(), *_FLAGS)).encode())
    target = folder / f"fleet-{hashlib.sha256(b'|'.join(parts)).hexdigest()[:16]}.so"
    if not target.is_file():
        with tempfile.TemporaryDirectory(dir=folder) as name:
            made = Path(name) / target.name
            command = [compiler, *_FLAGS, "-o", str(made), str(SOURCE)]
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=_COMPILE_LIMIT_S)
            made.replace(target)
    return target


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "pagestream" / "simulate"
