"""Compile C++ sources of this project, at first use into the user's cache folder or beforehand into another one.

The cache is by content: a library's name has digests of its source, its flags, the compiler and the processor. All
checkouts of a user share it, and a library is compiled once, whatever branch asks for it.

This module imports no torch: the simulator compiles its fleet with it, and an image's build the engine's kernels.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from pagestream_engine.cpu import processor_identity, read_cpuinfo
from pagestream_engine.errors import CompilerNotFound, NativeBuildError

_COMPILERS = ("c++", "g++", "clang++")
_LIMIT_S = 600.0
"""Of one run of the compiler, which takes 20 s of a processor: torch's operations, used after it, stay slower."""
_MOST_BYTES = 128 << 20
"""Of the cache's libraries: some 800 of the largest. Beyond, those go that have not been used for longest."""
_LEFT_BEHIND_S = 3600.0
"""Age at which what a build has beside its library is a killed build's, and from which a library may go."""


@dataclass(frozen=True, slots=True)
class NativeLibrary:
    """A shared library and what it is compiled from."""

    name: str
    """Beginning of its file name, distinct for each purpose and variant."""
    source: Path
    flags: tuple[str, ...]
    headers: tuple[Path, ...] = ()
    """What the source includes of this project."""

    def file_name(self, compiler: str, machine: bytes = b"") -> str:
        """Return `<name>-<toolchain>-<source>.so`, two digests of 16 hexadecimal digits.

        Args:
            compiler: path of the compiler.
            machine: identity of the machine, where the machine code may depend on it.

        Raises:
            NativeBuildError: the compiler does not report its version.
        """
        version = _run([compiler, "--version"])
        toolchain = _digest(version, " ".join(self.flags).encode(), platform.machine().encode(), machine)
        sources = (path.read_bytes() for path in (self.source, *self.headers))
        return f"{self.name}-{toolchain}-{_digest(*sources)}.so"


def toolchain_of(library: Path) -> str:
    """Return what `NativeLibrary.file_name` says of a library without the digest of its source."""
    return library.stem.rpartition("-")[0]


def find_compiler() -> str | None:
    """Return the path of a C++ compiler: `CXX`, or the first of c++, g++ and clang++ on the PATH; None without one."""
    names = (os.environ["CXX"], *_COMPILERS) if os.environ.get("CXX") else _COMPILERS
    return next(filter(None, map(shutil.which, names)), None)


def cached(library: NativeLibrary) -> Path:
    """Return the library in the user's cache folder, compiled if it isn't there.

    Any number of processes may do this at once: one compiles, the others wait for it. The folder may be shared by
    unlike machines: the file's name holds the identity of the processor, for which `-march=native` compiles.

    Raises:
        CompilerNotFound: there is no C++ compiler.
        NativeBuildError: the compiler failed or took too long, or the folder is not writable or not private.
    """
    compiler = find_compiler()
    if compiler is None:
        raise CompilerNotFound("no C++ compiler on the PATH; install g++ or clang++, or set CXX to the path of one")
    folder = cache_folder()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_private(folder)
        target = folder / library.file_name(compiler, processor_identity(read_cpuinfo()))
        if not _is_used(target):
            with _alone(target):
                if not _is_used(target):
                    _compile(compiler, library, target)
                    _tidy(folder)
    except OSError as error:
        raise NativeBuildError(
            f"{folder}: {error.strerror or error}; set XDG_CACHE_HOME to a writable folder"
        ) from error
    return target


def compile_into(folder: Path, library: NativeLibrary, compiler: str) -> Path:
    """Compile a library for other machines than this one into `folder`; return its path.

    Raises:
        NativeBuildError: the compiler failed or took too long.
        OSError: the folder can't be written.
    """
    return _compile(compiler, library, folder / library.file_name(compiler))


def cache_folder() -> Path:
    """Return the folder of compiled libraries: `$XDG_CACHE_HOME/pagestream/native`, by default below `~/.cache`."""
    return user_cache() / "native"


def user_cache() -> Path:
    """Return the user's cache folder of this project."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "pagestream"


def _is_used(target: Path) -> bool:
    """Return whether a library is there; if so, its time of change says from now on that it was used."""
    if not target.is_file():
        return False
    with suppress(OSError):  # a cache that others have filled and nobody may write
        os.utime(target)
    return True


@contextmanager
def _alone(target: Path) -> Iterator[None]:
    """Hold the lock of a library's build. The system takes it from a process that is killed.

    The file goes with the lock: who has opened it before, or makes another one, finds the library, or builds it again
    because this build has failed.
    """
    path = target.with_suffix(".lock")
    with path.open("w") as file:
        with suppress(OSError):  # a file system without locks: several processes may build, and the last one renames
            fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def _tidy(folder: Path) -> None:
    """Delete what killed builds have left, and the libraries that have not been used for longest where there are too
    many. What other processes delete at the same time is no fault."""
    old = time.time() - _LEFT_BEHIND_S
    libraries: list[tuple[float, int, Path]] = []
    for path in folder.iterdir():
        with suppress(FileNotFoundError):
            status = path.stat()
            if path.suffix == ".so":
                libraries.append((status.st_mtime, status.st_size, path))
            elif status.st_mtime < old:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    excess = sum(size for _, size, _ in libraries) - _MOST_BYTES
    for used, size, path in sorted(libraries):
        if excess <= 0 or used >= old:
            break
        path.unlink(missing_ok=True)
        excess -= size


def _compile(compiler: str, library: NativeLibrary, target: Path) -> Path:
    """Write beside the target and rename, so that no process loads a file that is not whole."""
    with tempfile.TemporaryDirectory(prefix="build-", dir=target.parent) as name:
        made = Path(name) / target.name
        _run([compiler, *library.flags, "-o", str(made), str(library.source)])
        made.replace(target)
    return target


def _run(command: list[str]) -> bytes:
    try:
        return subprocess.run(command, check=True, capture_output=True, timeout=_LIMIT_S).stdout
    except subprocess.CalledProcessError as error:
        detail = error.stderr.decode(errors="replace").strip()
        raise NativeBuildError(f"{command[0]} failed with status {error.returncode}: {detail}") from error
    except subprocess.TimeoutExpired as error:
        raise NativeBuildError(f"{command[0]} took longer than {_LIMIT_S:.0f} s") from error


def _digest(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def check_private(folder: Path) -> None:
    """Raise NativeBuildError for a folder that other users may write: what is loaded from it runs as this user."""
    status = folder.stat()
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise NativeBuildError(
            f"{folder}: given owner {status.st_uid} and mode {status.st_mode & 0o777:o}, expected this user "
            f"({os.geteuid()}) as owner and no write permission for others; run chmod 700 or remove the folder"
        )
