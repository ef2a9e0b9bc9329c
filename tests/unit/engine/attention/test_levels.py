"""Kernels that were compiled for other machines are used only where the processor can run them."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from pagestream_engine import native_build
from pagestream_engine.attention.native import library
from pagestream_engine.attention.native.levels import HEAD_DIMS_VARIABLE, LEVELS, find_prebuilt, libraries
from pagestream_engine.cpu import instruction_sets, read_cpuinfo
from pagestream_engine.native_prebuild import prebuild

pytestmark = pytest.mark.builds

HERE = LEVELS.get(platform.machine(), ())
needs_level = pytest.mark.skipif(not HERE, reason="no levels are known for this architecture")


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
    made = list(prebuild(tmp_path, libraries((16,), ("",)), str(quick_compiler)))
    assert len(made) == len(HERE)
    found = find_prebuilt(16, "", tmp_path)
    if not any(level.flags <= instruction_sets(read_cpuinfo()) for level in HERE):
        assert found is None
        return
    assert found in made
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
    root = Path(__file__).parents[4]
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
    done = subprocess.run(arguments, check=True, capture_output=True, text=True, env=environment, timeout=60)
    made = {Path(line).relative_to(tmp_path / "prebuilt").parent for line in done.stdout.splitlines()}
    folders = {import_module(name).PREBUILT for name in command[1].split()}
    assert {root / "services" / folder.parts[0].split("_")[1] / "src" / folder for folder in made} == folders
