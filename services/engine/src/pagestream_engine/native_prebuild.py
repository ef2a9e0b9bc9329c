"""Compile C++ libraries beforehand: for this machine into the user's cache, or for an image's machines into a folder.

`python -m pagestream_engine.native_prebuild [--out FOLDER] MODULE...`: each module names its libraries, and the folder
that an image has them in. `make setup` leaves FOLDER out, an image's build gives it. This module imports no torch, and
neither may those.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Protocol

from pagestream_engine.errors import NativeBuildError
from pagestream_engine.native_build import NativeLibrary, cached, compile_into, find_compiler


class LibraryModule(Protocol):
    """A module whose libraries can be compiled beforehand."""

    PREBUILT: Path
    """The folder of the package in which it looks for those of an image."""

    def libraries(self) -> Iterable[NativeLibrary]:
        """Return those for all machines of this architecture."""
        ...

    def own_libraries(self) -> Iterable[NativeLibrary]:
        """Return those that a process on this machine compiles at first use."""
        ...


def prebuild(folder: Path, libraries: Iterable[NativeLibrary], compiler: str) -> Iterator[Path]:
    """Compile libraries into `folder`, as many at once as there are processors; yield their paths.

    Raises:
        NativeBuildError: the compiler failed, or took longer than its limit.
        OSError: the folder can't be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with _pool() as pool:
        for made in pool.map(lambda library: compile_into(folder, library, compiler), libraries):
            made.chmod(0o755)
            yield made


def fill_cache(libraries: Iterable[NativeLibrary]) -> Iterator[Path]:
    """Compile into the user's cache what isn't there, as many at once as there are processors; yield all paths.

    Raises:
        NativeBuildError: see `native_build.cached`.
    """
    with _pool() as pool:
        yield from pool.map(cached, libraries)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    parser = argparse.ArgumentParser(description="Compile C++ libraries beforehand.")
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="gets the packages' folders for an image; default: the user's cache"
    )
    parser.add_argument("modules", nargs="+", metavar="MODULE", help="as pagestream_engine.layers.native.levels")
    given = parser.parse_args(arguments)
    compiler = find_compiler()
    if compiler is None:
        print("native_prebuild: no C++ compiler on the PATH; install g++, or set CXX to one", file=sys.stderr)  # noqa: T201
        return 1
    modules: dict[str, LibraryModule] = {name: import_module(name) for name in given.modules}
    try:
        if given.out is None:
            for made in fill_cache(library for module in modules.values() for library in module.own_libraries()):
                print(made)  # noqa: T201
            return 0
        for name, module in modules.items():
            package = name.rpartition(".")[0].replace(".", "/")
            for made in prebuild(given.out / package / module.PREBUILT.name, module.libraries(), compiler):
                print(made)  # noqa: T201
    except NativeBuildError as error:
        print(f"native_prebuild: {error}", file=sys.stderr)  # noqa: T201
        return 1
    return 0


def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(len(os.sched_getaffinity(0)))


if __name__ == "__main__":
    sys.exit(main())
