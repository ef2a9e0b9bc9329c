"""When a model computes deterministically: asked for, or where it is free."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pagestream_engine import EngineConfig
from pagestream_engine.layers.linear import NativeLinears, NativeMethod, RowByRowMethod, load_level
from pagestream_engine.layers.native.levels import LEVELS
from pagestream_engine.models import loader
from pagestream_engine.native_build import find_compiler
from pagestream_engine.runner import ModelRunner, numerics

pytestmark = pytest.mark.served
CPU = torch.device("cpu")
needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")


def _runner(folder: Path, **options: Any) -> ModelRunner:
    return ModelRunner(folder, EngineConfig.from_options(options), CPU)


def _set_kernels(monkeypatch: pytest.MonkeyPatch, *, fast: bool | None) -> None:
    """Let there be kernels of a level that is fast, of one that is not, or none."""

    def found(dtype: torch.dtype) -> NativeLinears | None:
        levels = LEVELS["x86_64"]
        level = levels[0] if fast else levels[-1]
        library = load_level(levels[-1])
        return None if fast is None or library is None else NativeLinears(library, level, dtype)

    monkeypatch.setattr(numerics, "native_linears", found)


@needs_compiler
@pytest.mark.parametrize("amx", [True, False])
@pytest.mark.parametrize("fast", [True, False, None])
def test_unasked_where_it_is_free(monkeypatch: pytest.MonkeyPatch, fast: bool | None, amx: bool) -> None:
    _set_kernels(monkeypatch, fast=fast)
    monkeypatch.setattr(numerics, "computes_bfloat16_on_amx", lambda *_: amx)
    for dtype, is_free in ((torch.float32, fast is True), (torch.bfloat16, fast is True and not amx)):
        assert numerics.wants_exact_linears(None, dtype, CPU) is is_free
        assert numerics.wants_exact_linears(True, dtype, CPU)
        assert not numerics.wants_exact_linears(False, dtype, CPU)
        for device in (CPU, torch.device("cuda")):
            asked = [numerics.wants_exact_linears(wanted, dtype, device, by_triton=True) for wanted in (None, True)]
            assert asked == [False, True]


@needs_compiler
@pytest.mark.parametrize("copied", [True, False], ids=["head-copied", "head-plain"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_asked_for_all_linears_are_exact(
    monkeypatch: pytest.MonkeyPatch, model_of: Callable[..., Path], dtype: str, copied: bool
) -> None:
    """A tied head among them, whether it is copied into panels or stays the embedding."""
    monkeypatch.setattr(numerics, "computes_bfloat16_on_amx", lambda *_: True)
    monkeypatch.setattr(loader, "_COPIED_HEAD_BYTES", 1 << 30 if copied else 0)
    runner = _runner(model_of("llama-tied"), dtype=dtype, deterministic=True)
    assert runner.numerics.deterministic
    methods = [linear.method for linear in runner._model.linears()]
    assert all(isinstance(method, NativeMethod) for method in methods)
    assert [method.is_copy for method in methods] == [True] * (len(methods) - 1) + [copied]


def test_asked_for_without_kernels_each_row_is_computed_alone(llama: Path) -> None:
    runner = _runner(llama, dtype="float16", deterministic=True)
    assert runner.numerics == numerics.Numerics(deterministic=True, linears="row by row")
    assert all(isinstance(linear.method, RowByRowMethod) for linear in runner._model.linears())


def test_switched_off_nothing_is_promised(llama: Path) -> None:
    off = _runner(llama, deterministic=False)
    assert off.numerics == numerics.Numerics(deterministic=False, linears="")
    assert not any(isinstance(linear.method, NativeMethod | RowByRowMethod) for linear in off._model.linears())


def test_unasked_never_by_torchs_own_attention(llama: Path) -> None:
    assert not _runner(llama, attention_backend="torch").numerics.deterministic
    assert _runner(llama, attention_backend="torch", deterministic=True).numerics.deterministic


def test_the_fingerprint_names_the_level_of_the_linears(monkeypatch: pytest.MonkeyPatch, llama: Path) -> None:
    runner = _runner(llama, deterministic=True)
    first = runner.fingerprint
    assert _runner(llama, deterministic=True).fingerprint == first
    runner.numerics = numerics.Numerics(deterministic=True, linears="another")
    assert runner.fingerprint != first
    assert len(first) == 16


def test_the_fingerprint_names_the_device_that_computes_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    chip = {"name": "a GPU", "capability": (9, 0)}
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: chip["name"])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: chip["capability"])

    def names() -> tuple[str, str]:
        return numerics._device(cpu), numerics._device(gpu)

    first = names()
    changes = {
        "processor": lambda: monkeypatch.setattr(numerics, "processor_identity", lambda _: b"another"),
        "capability": lambda: monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "another"),
        "threads": lambda: monkeypatch.setattr(torch, "get_num_threads", lambda: 77),
    }
    seen = {first[0]}
    for change in changes.values():
        change()
        on_cpu, on_gpu = names()
        assert on_cpu not in seen
        assert on_gpu == first[1]
        seen.add(on_cpu)
    for change in ({"name": "another GPU"}, {"capability": (10, 0)}):
        before = names()[1]
        chip.update(change)
        assert names()[1] != before
