"""Compile the kernels that draw beforehand, for other machines than this one.

`python -m pagestream_engine.sampler.native.prebuild [--out FOLDER]`: what an image's build runs.
"""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from pagestream_engine.native_build import compile_into, find_compiler
from pagestream_engine.sampler.native.levels import LEVELS, PREBUILT, library_for


def prebuild(compiler: str, folder: Path) -> Iterator[Path]:
    """Compile each level of this architecture into `folder`; yield the libraries.

    Raises:
        NativeBuildError: the compiler failed, or took longer than its limit.
        OSError: the folder can't be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for level in LEVELS.get(platform.machine(), ()):
        made = compile_into(folder, library_for(level), compiler)
        made.chmod(0o755)
        yield made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    parser = argparse.ArgumentParser(description="Compile the CPU kernels that draw for other machines.")
    parser.add_argument("--out", type=Path, default=PREBUILT, metavar="FOLDER")
    options = parser.parse_args(arguments)
    compiler = find_compiler()
    if compiler is None:
        print("prebuild: no C++ compiler on the PATH; install g++, or set CXX to one", file=sys.stderr)  # noqa: T201
        return 1
    for made in prebuild(compiler, options.out):
        print(made)  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
