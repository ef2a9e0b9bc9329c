"""A compiler for tests that ask what becomes of libraries, and not how fast they are."""

from pathlib import Path

import pytest
from pagestream_engine.native_build import find_compiler


@pytest.fixture
def quick_compiler(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The C++ compiler without optimisation, which takes 2 s for the kernels rather than 7."""
    compiler = find_compiler()
    if compiler is None:
        pytest.skip("no C++ compiler")
    path = tmp_path_factory.mktemp("compiler") / "c++"
    path.write_text(f'#!/bin/sh\nexec {compiler} "$@" -O0\n')
    path.chmod(0o700)
    return path
