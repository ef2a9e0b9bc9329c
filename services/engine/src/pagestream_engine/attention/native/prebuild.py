"""Compile the C++ kernels beforehand, for other machines than this one.

`python -m pagestream_engine.attention.native.prebuild [--out FOLDER] [--head-dims 64,128]`: what an image's build runs.
"""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from pagestream_engine.attention.native.levels import LEVELS, PREBUILT
from pagestream_engine.attention.native.library import library_for
from pagestream_engine.native_build import compile_into, find_compiler

HEAD_DIMS = (16, 32, 64, 80, 96, 112, 128, 192, 256)
"""Those of published models of the families that the engine runs, and of the models in its tests."""

CACHES = ("", "fp8")
"""What keys and values are kept as. A model of 32 or 16 other bits with a cache of bfloat16 needs a compiler, or runs
on torch's operations."""


def prebuild(compiler: str, head_dims: Sequence[int], folder: Path) -> Iterator[Path]:
    """Compile each level of this architecture for each head size and kind of cache into `folder`; yield the libraries.

    Raises:
        NativeBuildError: the compiler failed, or took longer than its limit.
        OSError: the folder can't be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for level in LEVELS.get(platform.machine(), ()):
        for head_dim in head_dims:
            for cache in CACHES:
                made = compile_into(folder, library_for(head_dim, level, cache), compiler)
                made.chmod(0o755)
                yield made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    parser = argparse.ArgumentParser(description="Compile the CPU kernels for other machines.")
    parser.add_argument("--out", type=Path, default=PREBUILT, metavar="FOLDER")
    parser.add_argument("--head-dims", default=",".join(map(str, HEAD_DIMS)), metavar="N,N,...")
    options = parser.parse_args(arguments)
    compiler = find_compiler()
    if compiler is None:
        print("prebuild: no C++ compiler on the PATH; install g++, or set CXX to one", file=sys.stderr)  # noqa: T201
        return 1
    head_dims = [int(each) for each in options.head_dims.split(",")]
    for made in prebuild(compiler, head_dims, options.out):
        print(made)  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
