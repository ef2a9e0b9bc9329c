"""C++ kernels are compiled once or found compiled, used only where the processor can run them, and done without."""

from __future__ import annotations

import logging
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from ctypes import CDLL
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import torch
from pagestream_engine import native_build
from pagestream_engine.attention.native import attention as library
from pagestream_engine.attention.native.levels import HEAD_DIMS_VARIABLE, LEVELS, SOURCE, find_prebuilt, libraries
from pagestream_engine.cpu import find_library, instruction_sets, read_cpuinfo
from pagestream_engine.layers import linear as linear_library
from pagestream_engine.layers.native.levels import LEVELS as LINEAR_LEVELS
from pagestream_engine.layers.native.levels import LinearLevel, usable_levels
from pagestream_engine.layers.native.levels import libraries as linear_libraries
from pagestream_engine.native_build import NativeBuildError, find_compiler, toolchain_of
from pagestream_engine.native_prebuild import prebuild
from support.processes.waiting import LIMIT_S

pytestmark = pytest.mark.builds

HERE = LEVELS.get(platform.machine(), ())
LINEARS = LINEAR_LEVELS.get(platform.machine(), ())
needs_level = pytest.mark.skipif(not HERE, reason="no levels are known for this architecture")
needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")


@pytest.fixture
def quick_compiler(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The C++ compiler without optimisation, which takes 2 s for the kernels of attention rather than 7."""
    compiler = find_compiler()
    if compiler is None:
        pytest.skip("no C++ compiler")
    path = tmp_path_factory.mktemp("compiler") / "c++"
    path.write_text(f'#!/bin/sh\nexec {compiler} "$@" -O0\n')
    path.chmod(0o700)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for level in HERE:
        (tmp_path / f"kernels-64-{level.name}-0123456789abcdef-fedcba9876543210.so").touch()
    return tmp_path


@needs_level
def test_the_best_level_that_the_processor_has(folder: Path) -> None:
    for level in HERE:
        found = find_prebuilt(64, "", folder, level.flags)
        assert found is not None
        assert level.name in found.name


@needs_level
def test_an_instruction_that_is_missing_rules_a_level_out(folder: Path) -> None:
    for level in HERE:
        for flag in level.flags:
            found = find_prebuilt(64, "", folder, level.flags - {flag})
            assert found is None or level.name not in found.name


def test_nothing_for_a_processor_that_tells_nothing(folder: Path) -> None:
    assert find_prebuilt(64, "", folder, frozenset()) is None


@needs_level
def test_nothing_for_another_head_size_folder_or_cache(folder: Path) -> None:
    assert find_prebuilt(128, "", folder, HERE[0].flags) is None
    assert find_prebuilt(64, "", folder / "none", HERE[0].flags) is None
    assert find_prebuilt(64, "fp8", folder, HERE[0].flags) is None


@needs_level
def test_a_build_may_name_its_head_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    every = list(libraries())
    monkeypatch.setenv(HEAD_DIMS_VARIABLE, "64 16")
    chosen = {each.name for each in libraries()}
    assert chosen == {each.name for each in every if each.name.split("-")[1] in ("16", "64")}
    monkeypatch.setenv(HEAD_DIMS_VARIABLE, "64 65")
    with pytest.raises(ValueError, match=r"expected some of 16 32 .* got 65"):
        list(libraries())


@needs_level
def test_what_is_compiled_beforehand_is_found_and_loaded_without_a_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick_compiler: Path
) -> None:
    usable = [level for level in HERE if level.flags <= instruction_sets(read_cpuinfo())]
    if not usable:
        pytest.skip("this processor has none of the levels")
    best = [each for each in libraries((16,), ("",)) if usable[0].name in each.name]
    made = list(prebuild(tmp_path, best, str(quick_compiler)))
    found = find_prebuilt(16, "", tmp_path)
    assert [found] == made
    monkeypatch.setattr(library, "find_prebuilt", lambda *names: find_prebuilt(*names, tmp_path))
    monkeypatch.setattr(native_build, "find_compiler", lambda: None)
    library.load_library.cache_clear()
    try:
        loaded = library.load_library(16)
    finally:
        library.load_library.cache_clear()
    assert loaded is not None
    assert loaded._name == str(found)


@pytest.mark.parametrize(("image", "num_modules"), [("engine", 5), ("engine-cuda", 1)])
def test_an_image_copies_all_that_its_prebuild_imports(tmp_path: Path, image: str, num_modules: int) -> None:
    """The image's build runs it without the packages around it, so that a layer is built anew for its files alone."""
    root = Path(__file__).parents[3]
    text = (root / "deploy" / "images" / f"{image}.Dockerfile").read_text().replace("\\\n", " ")
    (command,) = re.findall(r"^RUN PYTHONPATH=/src python3 (-m \S+) --out /prebuilt +(.+)$", text, re.MULTILINE)
    assert re.search(r"^COPY --from=\w+ /prebuilt /opt/pagestream$", text, re.MULTILINE)
    assert len(command[1].split()) == num_modules
    copied = re.findall(r"^COPY (.+) /src/(\S+)$", text, re.MULTILINE)
    assert copied
    for sources, target in copied:
        for source in map(root.joinpath, sources.split()):
            if source.is_dir():
                shutil.copytree(source, tmp_path / target)
            else:
                (tmp_path / target).mkdir(parents=True, exist_ok=True)
                shutil.copy(source, tmp_path / target)
    compiler = tmp_path / "c++"
    compiler.write_text('#!/bin/sh\nwhile [ $# -gt 1 ]; do [ "$1" = -o ] && : > "$2"; shift; done\n')
    compiler.chmod(0o755)
    # -S: without this environment's packages.
    arguments = [sys.executable, "-S", *command[0].split(), "--out", str(tmp_path / "prebuilt"), *command[1].split()]
    environment = {"PYTHONPATH": str(tmp_path), "CXX": str(compiler), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(arguments, check=True, capture_output=True, text=True, env=environment, timeout=LIMIT_S)
    made = {Path(line).relative_to(tmp_path / "prebuilt").parent for line in done.stdout.splitlines()}
    folders = {import_module(name).PREBUILT for name in command[1].split()}
    assert {root / "services" / folder.parts[0].split("_")[1] / "src" / folder for folder in made} == folders


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


@needs_compiler
@pytest.mark.slow
def test_source_has_no_warnings(tmp_path: Path) -> None:
    compiler = find_compiler()
    assert compiler is not None
    flags = ["-std=c++17", "-fopenmp", "-fsyntax-only", "-Wall", "-Wextra", "-Werror", "-Wno-psabi"]
    command = [compiler, *flags, "-DPAGESTREAM_HEAD_DIM=80", str(SOURCE)]
    subprocess.run(command, check=True, timeout=LIMIT_S)


# -- linears ------------------------------------------------------------------------------------------------------


def _cpuinfo(level: LinearLevel) -> str:
    return f"flags\t: {' '.join(sorted(level.flags))}\n"


@needs_level
def test_the_best_level_of_linears_that_the_processor_has() -> None:
    for level in LINEARS:
        assert usable_levels(_cpuinfo(level), {})[0] == level
        for flag in level.flags:
            without = _cpuinfo(level).replace(f" {flag} ", " ").replace(f" {flag}\n", "\n")
            assert level not in usable_levels(without, {})
    assert usable_levels("", {}) == ()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the levels of x86-64")
@pytest.mark.parametrize(
    ("limit", "name"),
    [
        ("AVX512_CORE_AMX", "amx-bf16"),
        ("AVX512_CORE_BF16", "avx512-bf16"),
        ("AVX512_CORE", "avx512"),
        ("AVX2", "avx2"),
        ("SSE41", "x86-64"),
    ],
)
def test_the_environment_rules_levels_out(limit: str, name: str) -> None:
    everything = f"flags\t: {' '.join(LINEARS[0].flags)} sse2\n"
    assert usable_levels(everything, {"ONEDNN_MAX_CPU_ISA": limit})[0].name == name


@needs_level
@pytest.mark.slow
@needs_compiler
def test_linears_compiled_beforehand_are_loaded_without_a_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler, level = find_compiler(), usable_levels(read_cpuinfo(), {})[-1]
    assert compiler is not None
    made = list(prebuild(tmp_path, linear_libraries(), compiler))
    assert len(made) == len(LINEARS)
    # No level's name may find the library of another one, whose instructions the processor may lack.
    found = [find_library(tmp_path, "linear", (each,), each.flags) for each in LINEARS]
    assert sorted(map(str, found)) == sorted(map(str, made))
    monkeypatch.setattr(linear_library, "PREBUILT", tmp_path)
    monkeypatch.setattr(native_build, "find_compiler", lambda: None)
    linear_library.load_level.cache_clear()
    try:
        loaded = linear_library.load_level(level)
    finally:
        linear_library.load_level.cache_clear()
    assert Path(loaded._name) in made
    assert level.name in loaded._name


@needs_compiler
@pytest.mark.parametrize("error", [NativeBuildError("no such option: -mamx-bf16"), OSError("denied")], ids=str)
def test_the_next_level_where_one_cannot_be_had(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    levels = usable_levels(read_cpuinfo(), {})
    better = replace(levels[0], name="better")
    load = linear_library.load_level

    def load_all_but_the_better(level: LinearLevel) -> CDLL:
        if level == better:
            raise error
        return load(level)

    monkeypatch.setattr(linear_library, "usable_levels", lambda *_: (better, levels[0]))
    monkeypatch.setattr(linear_library, "load_level", load_all_but_the_better)
    kernels = linear_library.native_linears.__wrapped__(torch.float32)
    assert kernels is not None
    assert kernels.level == levels[0]
    assert caplog.messages == [f"the C++ kernels of linears use {levels[0].name}: {error}"]
    monkeypatch.setattr(linear_library, "usable_levels", lambda *_: (better, better))
    assert linear_library.native_linears.__wrapped__(torch.float32) is None
    assert caplog.messages[1:] == [f"the C++ kernels of linears can't be used: {error}"]


@pytest.mark.slow
@pytest.mark.skipif(find_compiler() is None or platform.machine() != "x86_64", reason="no C++ compiler for x86-64")
@pytest.mark.skipif("amx_tile" in instruction_sets(read_cpuinfo()), reason="the system gives this processor's tiles")
def test_a_level_whose_registers_the_system_denies_is_refused_before_it_computes() -> None:
    with pytest.raises(OSError, match="does not give this process the registers of amx-bf16"):
        linear_library.load_level(LINEARS[0])
