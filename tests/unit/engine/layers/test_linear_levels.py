"""The kernels of linears run at the best level that the processor has and the environment allows."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest
from pagestream_engine import native_build
from pagestream_engine.cpu import read_cpuinfo
from pagestream_engine.layers.native import library
from pagestream_engine.layers.native.levels import LEVELS, LinearLevel, best_level
from pagestream_engine.layers.native.prebuild import prebuild
from pagestream_engine.native_build import find_compiler
from pagestream_engine.native_levels import find_library

HERE = LEVELS.get(platform.machine(), ())
needs_level = pytest.mark.skipif(not HERE, reason="no levels are known for this architecture")


def _cpuinfo(level: LinearLevel) -> str:
    return f"flags\t: {' '.join(sorted(level.flags))}\n"


@needs_level
def test_the_best_level_that_the_processor_has() -> None:
    for level in HERE:
        assert best_level(_cpuinfo(level), {}) == level
        for flag in level.flags:
            without = _cpuinfo(level).replace(f" {flag} ", " ").replace(f" {flag}\n", "\n")
            assert best_level(without, {}) != level
    assert best_level("", {}) is None


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the levels of x86-64")
@pytest.mark.parametrize(
    ("limit", "name"),
    [
        ("AVX512_CORE_AMX", "avx512-bf16"),
        ("AVX512_CORE_BF16", "avx512-bf16"),
        ("AVX512_CORE", "avx512"),
        ("AVX2", "avx2"),
        ("SSE41", "x86-64"),
    ],
)
def test_the_environment_rules_levels_out(limit: str, name: str) -> None:
    everything = f"flags\t: {' '.join(HERE[0].flags)} sse2 amx_bf16\n"
    level = best_level(everything, {"ONEDNN_MAX_CPU_ISA": limit})
    assert level is not None
    assert level.name == name


@needs_level
@pytest.mark.builds
@pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")
def test_what_is_compiled_beforehand_is_loaded_without_a_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler, level = find_compiler(), best_level(read_cpuinfo(), {})
    assert compiler is not None
    assert level is not None
    made = list(prebuild(compiler, tmp_path))
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
    assert loaded is not None
    assert Path(loaded._name) in made
    assert level.name in loaded._name
