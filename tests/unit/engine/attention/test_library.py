"""The C++ kernels are loaded once, and done without where they can't be had."""

from __future__ import annotations

import logging
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from pagestream_engine.attention.native import library
from pagestream_engine.attention.native.levels import SOURCE
from pagestream_engine.native_build import find_compiler, toolchain_of

pytestmark = pytest.mark.builds

_NEEDS_COMPILER = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, and nothing loaded yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    library.load_library.cache_clear()
    return tmp_path / "pagestream" / "native"


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    yield
    library.load_library.cache_clear()


def test_a_library_is_loaded_once(fresh: Path, monkeypatch: pytest.MonkeyPatch, quick_compiler: Path) -> None:
    monkeypatch.setenv("CXX", str(quick_compiler))
    loaded = library.load_library(16)
    assert loaded is not None
    assert library.load_library(16) is loaded
    (made,) = fresh.iterdir()
    assert loaded._name == str(made)
    assert made.name.startswith("kernels-16-native-")


def test_no_kernels_for_odd_head_sizes(fresh: Path) -> None:
    assert library.load_library(24) is None
    assert not fresh.exists()


def test_without_a_compiler_one_warning(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(fresh))
    monkeypatch.delenv("CXX", raising=False)
    with caplog.at_level(logging.WARNING):
        assert library.load_library(16) is None
        assert library.load_library(16) is None
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "no C++ compiler" in caplog.text


def test_a_file_that_is_no_library_is_a_warning(
    fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wrong = tmp_path / "wrong.so"
    wrong.write_bytes(b"cut off")
    monkeypatch.setattr(library, "cached", lambda _: wrong)
    with caplog.at_level(logging.WARNING):
        assert library.load_library(16) is None
    assert "C++ kernels can't be used" in caplog.text


def test_the_version_is_of_the_toolchain_and_not_of_the_source() -> None:
    path = Path("/cache/kernels-64-x86-64-v4-0123456789abcdef-fedcba9876543210.so")
    assert toolchain_of(path) == "kernels-64-x86-64-v4-0123456789abcdef"


@_NEEDS_COMPILER
def test_source_has_no_warnings(tmp_path: Path) -> None:
    compiler = find_compiler()
    assert compiler is not None
    flags = ["-std=c++17", "-fopenmp", "-fsyntax-only", "-Wall", "-Wextra", "-Werror", "-Wno-psabi"]
    command = [compiler, *flags, "-DPAGESTREAM_HEAD_DIM=80", str(SOURCE)]
    subprocess.run(command, check=True, timeout=60)
