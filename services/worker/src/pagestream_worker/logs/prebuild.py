"""Compile the logs beforehand, for other machines of this architecture.

`python -m pagestream_worker.logs.prebuild [--out FOLDER]`: what an image's build runs.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from pagestream_engine.native_build import compile_into, find_compiler

from pagestream_worker.logs.library import LIBRARY, PREBUILT


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    parser = argparse.ArgumentParser(description="Compile the logs for other machines.")
    parser.add_argument("--out", type=Path, default=PREBUILT, metavar="FOLDER")
    options = parser.parse_args(arguments)
    compiler = find_compiler()
    if compiler is None:
        print("prebuild: no C++ compiler on the PATH; install g++, or set CXX to one", file=sys.stderr)  # noqa: T201
        return 1
    options.out.mkdir(parents=True, exist_ok=True)
    made = compile_into(options.out, LIBRARY, compiler)
    made.chmod(0o755)
    print(made)  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
