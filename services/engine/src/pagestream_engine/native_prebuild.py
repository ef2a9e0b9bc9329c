"""Compile C++ libraries beforehand, for other machines than this one: what an image's build runs.

`python -m pagestream_engine.native_prebuild --out FOLDER MODULE...`: each module names its libraries, and the folder
that an image has them in. This module imports no torch, and neither may those.
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

from pagestream_engine.native_build import NativeLibrary, compile_into, find_compiler


class LibraryModule(Protocol):
    """A module whose libraries an image brings."""

    PREBUILT: Path
    """The folder of the package in which it looks for them."""

    def libraries(self) -> Iterable[NativeLibrary]:
        """Return those for all machines of this architecture."""
        ...


def prebuild(folder: Path, libraries: Iterable[NativeLibrary], compiler: str) -> Iterator[Path]:
    """Compile libraries into `folder`, as many at once as there are processors; yield their paths.

    Raises:
        NativeBuildError: the compiler failed, or took longer than its limit.
        OSError: the folder can't be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for made in pool.map(lambda library: compile_into(folder, library, compiler), libraries):
            made.chmod(0o755)
            yield made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    parser = argparse.ArgumentParser(description="Compile C++ libraries for other machines.")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="gets the packages' folders")
    parser.add_argument("modules", nargs="+", metavar="MODULE", help="as pagestream_engine.layers.native.levels")
    given = parser.parse_args(arguments)
    compiler = find_compiler()
    if compiler is None:
        print("native_prebuild: no C++ compiler on the PATH; install g++, or set CXX to one", file=sys.stderr)  # noqa: T201
        return 1
    for name in given.modules:
        module: LibraryModule = import_module(name)
        package = name.rpartition(".")[0].replace(".", "/")
        for made in prebuild(given.out / package / module.PREBUILT.name, module.libraries(), compiler):
            print(made)  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
