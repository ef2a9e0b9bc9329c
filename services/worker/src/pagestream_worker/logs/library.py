"""The compiled logs: a library that an image brings, or one compiled for this machine.

This module imports neither torch nor the broker's code: an image's build compiles the library without them.
"""

import ctypes
import logging
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from pagestream_engine.cpu import Level, find_library
from pagestream_engine.errors import NativeBuildError
from pagestream_engine.native_build import NativeLibrary, cached

PREBUILT = Path(__file__).parent / "prebuilt"
"""Where an image's build puts the library (`pagestream_engine.native_prebuild`). A checkout has none."""
_BASELINE = Level("baseline", frozenset())
"""What every processor of an architecture has: the vectors of a link are four words wide."""
LIBRARY = NativeLibrary(
    f"logs-{_BASELINE.name}", Path(__file__).parent / "token_logs.cpp", ("-O3", "-std=c++17", "-shared", "-fPIC")
)

logger = logging.getLogger(__name__)


def libraries() -> Iterator[NativeLibrary]:
    """Yield what an image brings."""
    yield LIBRARY


def own_libraries() -> Iterator[NativeLibrary]:
    """Yield what a process on this machine compiles at first use."""
    yield LIBRARY


def find_or_compile() -> Path:
    """Return the path of the library, which an image brings or the user's cache holds, compiled if need be.

    Raises:
        NativeBuildError: there is none, and it can't be compiled (see native_build.cached).
    """
    return find_library(PREBUILT, "logs", (_BASELINE,)) or cached(LIBRARY)


@cache
def load_library() -> ctypes.PyDLL | None:
    """Load the library, compiled if need be; return None (and log one warning) where that fails.

    Its functions hold the interpreter's lock: they take less time than giving it up and waiting for it again.
    """
    try:
        return ctypes.PyDLL(str(find_or_compile()))
    except (OSError, NativeBuildError) as error:
        logger.warning("token logs are written by Python, at several times the cost: %s", error)
        return None
