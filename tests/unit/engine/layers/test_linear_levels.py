"""The kernels of linears run at the best level that the processor has and the environment allows."""

from __future__ import annotations

import platform
from ctypes import CDLL
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pagestream_engine import native_build
from pagestream_engine.cpu import instruction_sets, read_cpuinfo
from pagestream_engine.errors import NativeBuildError
from pagestream_engine.layers.native import library
from pagestream_engine.layers.native.levels import LEVELS, LinearLevel, libraries, usable_levels
from pagestream_engine.native_build import find_compiler
from pagestream_engine.native_levels import find_library
from pagestream_engine.native_prebuild import prebuild

HERE = LEVELS.get(platform.machine(), ())
needs_level = pytest.mark.skipif(not HERE, reason="no levels are known for this architecture")


def _cpuinfo(level: LinearLevel) -> str:
    return f"flags\t: {' '.join(sorted(level.flags))}\n"


@needs_level
def test_the_best_level_that_the_processor_has() -> None:
    for level in HERE:
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
    everything = f"flags\t: {' '.join(HERE[0].flags)} sse2\n"
    assert usable_levels(everything, {"ONEDNN_MAX_CPU_ISA": limit})[0].name == name


@needs_level
@pytest.mark.builds
@pytest.mark.slow
@pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")
def test_what_is_compiled_beforehand_is_loaded_without_a_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler, level = find_compiler(), usable_levels(read_cpuinfo(), {})[-1]
    assert compiler is not None
    made = list(prebuild(tmp_path, libraries(), compiler))
    assert len(made) == len(HERE)
    # No level's name may find the library of another one, whose instructions the processor may lack.
    found = [find_library(tmp_path, "linear", (each,), each.flags) for each in HERE]
    assert sorted(map(str, found)) == sorted(map(str, made))
    monkeypatch.setattr(library, "PREBUILT", tmp_path)
    monkeypatch.setattr(native_build, "find_compiler", lambda: None)
    library.load_level.cache_clear()
    try:
        loaded = library.load_level(level)
    finally:
        library.load_level.cache_clear()
    assert Path(loaded._name) in made
    assert level.name in loaded._name


@pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")
@pytest.mark.parametrize("error", [NativeBuildError("no such option: -mamx-bf16"), OSError("denied")], ids=str)
def test_the_next_level_where_one_cannot_be_had(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    levels = usable_levels(read_cpuinfo(), {})
    better = replace(levels[-1], name="better")
    load = library.load_level

    def load_all_but_the_better(level: LinearLevel) -> CDLL:
        if level == better:
            raise error
        return load(level)

    monkeypatch.setattr(library, "usable_levels", lambda *_: (better, levels[-1]))
    monkeypatch.setattr(library, "load_level", load_all_but_the_better)
    kernels = library.native_linears.__wrapped__(torch.float32)
    assert kernels is not None
    assert kernels.level == levels[-1]
    assert caplog.messages == [f"the C++ kernels of linears use {levels[-1].name}: {error}"]
    monkeypatch.setattr(library, "usable_levels", lambda *_: (better, better))
    assert library.native_linears.__wrapped__(torch.float32) is None
    assert caplog.messages[1:] == [f"the C++ kernels of linears can't be used: {error}"]


@pytest.mark.builds
@pytest.mark.skipif(find_compiler() is None or platform.machine() != "x86_64", reason="no C++ compiler for x86-64")
@pytest.mark.skipif("amx_tile" in instruction_sets(read_cpuinfo()), reason="the system gives this processor's tiles")
def test_a_level_whose_registers_the_system_denies_is_refused_before_it_computes() -> None:
    with pytest.raises(OSError, match="does not give this process the registers of amx-bf16"):
        library.load_level(HERE[0])
