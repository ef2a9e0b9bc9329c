"""The fleet's C++, compiled at first use."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

from pagestream_engine.errors import CompilerNotFound, NativeBuildError
from pagestream_engine.native_build import NativeLibrary, cached

from pagestream_simulator.errors import CompilerMissingError

_LIBRARY = NativeLibrary("fleet", Path(__file__).parent / "fleet.cpp", ("-O2", "-std=c++17", "-shared", "-fPIC"))


@cache
def load_library() -> ctypes.CDLL:
    """Load the compiled fleet.

    Raises:
        CompilerMissingError: there is no C++ compiler, or it failed.
    """
    try:
        return ctypes.CDLL(str(cached(_LIBRARY)))
    except CompilerNotFound as error:
        raise CompilerMissingError(
            "simulate needs a C++ compiler", hint="install g++ or clang++, or set CXX to the path of one"
        ) from error
    except (OSError, NativeBuildError) as error:
        raise CompilerMissingError(f"the simulation can't be compiled: {error}") from error
