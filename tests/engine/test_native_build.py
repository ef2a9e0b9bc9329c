"""C++ is compiled once, kept privately and by content, and every failure is a NativeBuildError that says what to do."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from pagestream_engine import native_build
from pagestream_engine.native_build import (
    CompilerNotFound,
    NativeBuildError,
    NativeLibrary,
    cached,
    compile_into,
    find_compiler,
    toolchain_of,
)
from support.processes.waiting import LIMIT_S

pytestmark = pytest.mark.builds

ROOT = Path(__file__).resolve().parents[2]
_COMPILER = find_compiler()
_NEEDS_COMPILER = pytest.mark.skipif(_COMPILER is None, reason="no C++ compiler")


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
    return _script(path, f'"{_COMPILER}" "$@"; [ "$1" = --version ] && echo another; true')


@_NEEDS_COMPILER
def test_a_library_is_compiled_once_into_a_private_folder(folder: Path, library: NativeLibrary) -> None:
    made = cached(library)
    before = made.stat()
    assert cached(library) == made
    assert list(folder.iterdir()) == [made]
    assert made.stat().st_ino == before.st_ino
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
    assert _COMPILER is not None
    made = compile_into(tmp_path, library, _COMPILER)
    monkeypatch.setattr(native_build, "processor_identity", lambda _: b"another processor")
    assert compile_into(tmp_path, library, _COMPILER) == made


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


def _counting_compiler(path: Path, log: Path, *, first: str = "true") -> str:
    """A compiler like the one that is here, which notes each library that it compiles before it does."""
    return _script(path, f'[ "$1" = --version ] || {{ echo >>"{log}"; {first}; }}; exec "{_COMPILER}" "$@"')


def _build(library: NativeLibrary) -> subprocess.Popen[str]:
    """Start a process that asks for a library and prints its path."""
    code = (
        "from pathlib import Path\n"
        "from pagestream_engine.native_build import NativeLibrary, cached\n"
        f"print(cached(NativeLibrary('answer', Path({str(library.source)!r}), {library.flags!r})))\n"
    )
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True)


@_NEEDS_COMPILER
def test_of_processes_that_ask_at_once_one_compiles(
    folder: Path, library: NativeLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "compiled"
    monkeypatch.setenv("CXX", _counting_compiler(tmp_path / "counting", log, first="sleep 1"))
    children = [_build(library) for _ in range(3)]
    printed = {child.communicate(timeout=LIMIT_S)[0].strip() for child in children}
    assert [child.returncode for child in children] == [0, 0, 0]
    assert printed == {str(cached(library))}
    assert [str(path) for path in folder.iterdir()] == list(printed)
    assert log.read_text() == "\n"


@_NEEDS_COMPILER
def test_a_build_that_was_killed_holds_nobody_up_and_leaves_nothing(
    folder: Path, library: NativeLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "compiled"
    monkeypatch.setenv("CXX", _counting_compiler(tmp_path / "hanging", log, first="sleep 100"))
    killed = _build(library)
    until = time.monotonic() + LIMIT_S
    while not log.exists():
        assert time.monotonic() < until
        time.sleep(0.02)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate(timeout=LIMIT_S)
    _counting_compiler(tmp_path / "hanging", log)  # the same name and version, so the same library
    left = [path for path in folder.iterdir() if path.suffix != ".so"]
    assert left
    for path in left:
        os.utime(path, (1, 1))
    made = cached(library)
    assert list(folder.iterdir()) == [made]


@_NEEDS_COMPILER
def test_the_libraries_that_were_not_used_for_longest_go(
    folder: Path, library: NativeLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    variants = [NativeLibrary("answer", library.source, (*library.flags, f"-DVARIANT={number}")) for number in range(4)]
    first, second, third = (cached(each) for each in variants[:3])
    for age, path in enumerate((third, second, first)):
        os.utime(path, (age, age))
    assert cached(variants[2]) == third  # used now
    monkeypatch.setattr(native_build, "_MOST_BYTES", 2 * third.stat().st_size)
    fourth = cached(variants[3])
    assert set(folder.iterdir()) == {third, fourth}


@_NEEDS_COMPILER
def test_setup_fills_the_cache_with_what_modules_name(folder: Path, library: NativeLibrary, tmp_path: Path) -> None:
    (tmp_path / "answers.py").write_text(
        "from pathlib import Path\n"
        "from pagestream_engine.native_build import NativeLibrary\n"
        "def own_libraries():\n"
        f"    yield NativeLibrary('answer', Path({str(library.source)!r}), {library.flags!r})\n"
    )
    command = [sys.executable, "-m", "pagestream_engine.native_prebuild", "answers"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=LIMIT_S, env=environment)
    assert done.stdout.split() == [str(cached(library))]


@pytest.mark.slow
@pytest.mark.timeout(600)
@_NEEDS_COMPILER
def test_a_first_start_after_setup_compiles_nothing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = (ROOT / "tools" / "setup.sh").read_text()
    head_dims, command = re.findall(r"(\w+=[\d ]+) .venv/bin/python -m ([\w.\s\\]+)", script)[-1]
    name, _, value = head_dims.partition("=")
    modules = command.replace("\\", " ").split()
    subprocess.run(
        [sys.executable, "-m", *modules], check=True, capture_output=True, timeout=500, env={**os.environ, name: value}
    )
    made = set(folder.iterdir())
    log = tmp_path / "compiled"
    monkeypatch.setenv("CXX", _counting_compiler(tmp_path / "counting", log))
    code = (
        "import sys; from pagestream_engine import LLM\n"
        "llm = LLM(sys.argv[1], device='cpu', num_gpu_blocks_override=8, max_model_len=64, enable_lora=True)\n"
        "llm.generate('The lighthouse', use_tqdm=False)\n"
        "from pagestream_worker.logs.library import load_library; assert load_library() is not None"
    )
    model = str(ROOT / "deploy" / "demo-model" / "model")
    subprocess.run([sys.executable, "-c", code, model], check=True, timeout=LIMIT_S)
    assert set(folder.iterdir()) == made
    assert not log.exists()


def test_setup_goes_on_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    command = [sys.executable, "-m", "pagestream_engine.native_prebuild", "pagestream_worker.logs.library"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    assert (done.returncode, done.stdout) == (1, "")
    assert "install g++" in done.stderr
