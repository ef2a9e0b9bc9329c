"""The C++ kernels are compiled once, kept privately, and done without where they can't be had."""

from __future__ import annotations

import logging
import subprocess
from pathlib import Path

import pytest
from pagestream_engine.attention.native import library

_NEEDS_COMPILER = pytest.mark.skipif(library.find_compiler() is None, reason="no C++ compiler")


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, and nothing loaded yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    library.load_library.cache_clear()
    return tmp_path / "pagestream" / "native"


@pytest.fixture(autouse=True)
def forget() -> object:
    yield
    library.load_library.cache_clear()


def _script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


@_NEEDS_COMPILER
def test_a_library_is_compiled_once(fresh: Path) -> None:
    assert library.load_library(16) is not None
    (made,) = fresh.iterdir()
    before = made.stat()
    library.load_library.cache_clear()
    assert library.load_library(16) is not None
    assert [path.stat().st_mtime_ns for path in fresh.iterdir()] == [before.st_mtime_ns]
    assert fresh.stat().st_mode & 0o077 == 0


def test_no_kernels_for_odd_head_sizes(fresh: Path) -> None:
    assert library.load_library(24) is None
    assert not fresh.exists()


def test_without_a_compiler_it_is_said_once(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(fresh))
    monkeypatch.delenv("CXX", raising=False)
    with caplog.at_level(logging.WARNING):
        assert library.load_library(16) is None
        assert library.load_library(16) is None
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "no C++ compiler" in caplog.text


def test_a_compiler_that_fails_is_quoted(
    fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(
        "CXX", _script(tmp_path / "broken", '[ "$1" = --version ] || { echo no such flag >&2; exit 1; }')
    )
    with caplog.at_level(logging.WARNING):
        assert library.load_library(16) is None
    assert "no such flag" in caplog.text
    assert list(fresh.iterdir()) == []


@_NEEDS_COMPILER
def test_a_folder_that_others_may_write_is_not_trusted(fresh: Path, caplog: pytest.LogCaptureFixture) -> None:
    fresh.mkdir(parents=True)
    fresh.chmod(0o777)
    with caplog.at_level(logging.WARNING):
        assert library.load_library(16) is None
    assert "writable by nobody else" in caplog.text


@_NEEDS_COMPILER
def test_another_compiler_makes_another_library(fresh: Path, tmp_path: Path) -> None:
    compiler = library.find_compiler()
    assert compiler is not None
    wrapper = _script(tmp_path / "wrapper", f'"{compiler}" "$@"; [ "$1" = --version ] && echo another; true')
    first, second = (library.compiled(one, 16, fresh) for one in (compiler, wrapper))
    assert first != second
    assert {first, second} == set(fresh.iterdir())


@_NEEDS_COMPILER
def test_source_has_no_warnings(tmp_path: Path) -> None:
    compiler = library.find_compiler()
    assert compiler is not None
    flags = ["-std=c++17", "-fopenmp", "-fsyntax-only", "-Wall", "-Wextra", "-Werror", "-Wno-psabi"]
    command = [compiler, *flags, "-DPAGESTREAM_HEAD_DIM=80", str(library.SOURCE)]
    subprocess.run(command, check=True, timeout=60)
