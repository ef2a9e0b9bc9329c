"""C++ is compiled once, kept privately, and every failure is a NativeBuildError that says what to do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from pagestream_engine import native_build
from pagestream_engine.errors import CompilerNotFound, NativeBuildError
from pagestream_engine.native_build import NativeLibrary, cached, compile_into, find_compiler, toolchain_of

pytestmark = pytest.mark.builds

_NEEDS_COMPILER = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache folder, which does not exist yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert native_build.cache_folder() == tmp_path / "cache" / "pagestream" / "native"
    return native_build.cache_folder()


@pytest.fixture
def library(tmp_path: Path) -> NativeLibrary:
    source = tmp_path / "answer.cpp"
    source.write_text('extern "C" int answer() { return 42; }\n')
    return NativeLibrary("answer", source, ("-shared", "-fPIC"))


def _script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def _another_compiler(path: Path) -> str:
    """A compiler like the one that is here, of another version."""
    return _script(path, f'"{find_compiler()}" "$@"; [ "$1" = --version ] && echo another; true')


@_NEEDS_COMPILER
def test_a_library_is_compiled_once_into_a_private_folder(folder: Path, library: NativeLibrary) -> None:
    made = cached(library)
    before = made.stat()
    assert cached(library) == made
    assert list(folder.iterdir()) == [made]
    assert made.stat().st_mtime_ns == before.st_mtime_ns
    assert folder.stat().st_mode & 0o077 == 0


@_NEEDS_COMPILER
def test_what_the_machine_code_depends_on_is_in_the_name(
    folder: Path, library: NativeLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = cached(library)
    others = [cached(NativeLibrary("answer", library.source, (*library.flags, "-O1")))]
    monkeypatch.setattr(native_build, "processor_identity", lambda _: b"another processor")
    others.append(cached(library))
    monkeypatch.setenv("CXX", _another_compiler(tmp_path / "wrapper"))
    others.append(cached(library))
    toolchains = {toolchain_of(path) for path in (first, *others)}
    assert len(toolchains) == len({first, *others}) == 4
    library.source.write_text("// The answer.\n" + library.source.read_text())
    changed = cached(library)
    assert changed != others[-1]
    assert toolchain_of(changed) == toolchain_of(others[-1])
    header = tmp_path / "answer.h"
    header.write_text("// 42\n")
    including = NativeLibrary("answer", library.source, library.flags, (header,))
    before = cached(including)
    header.write_text("// 43\n")
    assert len({changed, before, cached(including)}) == 3


@_NEEDS_COMPILER
def test_a_library_for_other_machines_does_not_depend_on_this_one(
    library: NativeLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = find_compiler()
    assert compiler is not None
    made = compile_into(tmp_path, library, compiler)
    monkeypatch.setattr(native_build, "processor_identity", lambda _: b"another processor")
    assert compile_into(tmp_path, library, compiler) == made


def test_without_a_compiler(folder: Path, library: NativeLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(CompilerNotFound, match="set CXX"):
        cached(library)
    assert not folder.exists()


@pytest.mark.parametrize("what", ["--version", "-shared"])
def test_a_compiler_that_fails_is_quoted(
    folder: Path, library: NativeLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    broken = _script(tmp_path / "broken", f'[ "$1" != {what} ] || {{ echo no such flag >&2; exit 3; }}')
    monkeypatch.setenv("CXX", broken)
    with pytest.raises(NativeBuildError, match="broken failed with status 3: no such flag"):
        cached(library)
    assert list(folder.iterdir()) == []


@_NEEDS_COMPILER
@pytest.mark.parametrize("mode", [0o777, 0o770])
def test_a_folder_that_others_may_write_is_not_trusted(folder: Path, library: NativeLibrary, mode: int) -> None:
    folder.mkdir(parents=True)
    folder.chmod(mode)
    with pytest.raises(NativeBuildError, match=f"mode {mode:o}, expected .* no write permission for others"):
        cached(library)


@_NEEDS_COMPILER
def test_a_folder_that_cannot_be_made(folder: Path, library: NativeLibrary) -> None:
    folder.parent.parent.mkdir(parents=True)
    folder.parent.write_text("no folder")
    with pytest.raises(NativeBuildError, match="set XDG_CACHE_HOME to a writable folder"):
        cached(library)


@_NEEDS_COMPILER
def test_processes_may_compile_at_once(folder: Path, library: NativeLibrary) -> None:
    code = (
        "from pathlib import Path\n"
        "from pagestream_engine.native_build import NativeLibrary, cached\n"
        f"print(cached(NativeLibrary('answer', Path({str(library.source)!r}), {library.flags!r})))\n"
    )
    children = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    printed = {child.communicate(timeout=60)[0].strip() for child in children}
    assert [child.returncode for child in children] == [0, 0, 0]
    assert printed == {str(cached(library))}
    assert [str(path) for path in folder.iterdir()] == list(printed)
