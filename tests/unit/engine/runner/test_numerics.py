"""When a model computes deterministically: asked for, or for next to nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pagestream_engine.config import EngineConfig
from pagestream_engine.errors import ConfigError
from pagestream_engine.layers.row_counts import RowCounts
from pagestream_engine.native_build import find_compiler
from pagestream_engine.runner import ModelRunner, numerics
from support.engines.tiny_models import make_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "llama", "llama")


def _runner(folder: Path, **options: Any) -> ModelRunner:
    return ModelRunner(folder, EngineConfig.from_options(options), torch.device("cpu"))


@pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")
@pytest.mark.parametrize("is_free", [True, False])
def test_unasked_only_where_it_is_free(monkeypatch: pytest.MonkeyPatch, folder: Path, is_free: bool) -> None:
    monkeypatch.setattr(RowCounts, "is_free", is_free)
    assert _runner(folder).numerics.deterministic is is_free
    assert _runner(folder, deterministic=True).numerics.deterministic
    off = _runner(folder, deterministic=False).numerics
    assert not off.deterministic
    assert not off.linears


@pytest.fixture(params=[True, False], ids=["amx", "no-amx"])
def has_amx(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(numerics, "computes_bfloat16_on_amx", lambda *_: request.param)
    monkeypatch.setattr(numerics, "emulates_bfloat16_in_avx512", lambda *_: False)
    return bool(request.param)


@pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")
def test_bfloat16_on_amx_refuses_it_and_is_off_by_default(
    monkeypatch: pytest.MonkeyPatch, folder: Path, has_amx: bool
) -> None:
    monkeypatch.setattr(RowCounts, "is_free", True)
    assert _runner(folder, dtype="bfloat16").numerics.deterministic is not has_amx
    assert not _runner(folder, dtype="bfloat16", deterministic=False).numerics.deterministic
    if not has_amx:
        assert _runner(folder, dtype="bfloat16", deterministic=True).numerics.deterministic
        return
    with pytest.raises(ConfigError, match=r"^deterministic: given True, expected False or None") as caught:
        _runner(folder, dtype="bfloat16", deterministic=True)
    assert caught.value.field == "deterministic"
    for remedy in ("float32", "ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16"):
        assert remedy in str(caught.value)


def test_avx512_without_bfloat16_refuses_it_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numerics, "computes_bfloat16_on_amx", lambda *_: False)
    monkeypatch.setattr(numerics, "emulates_bfloat16_in_avx512", lambda *_: True)
    cpu = torch.device("cpu")
    assert numerics.possible_mode(None, torch.bfloat16, cpu) is False
    with pytest.raises(ConfigError, match=r"AVX-512 and no instructions for it.*float32"):
        numerics.possible_mode(True, torch.bfloat16, cpu)


@pytest.mark.parametrize(
    ("dtype", "device"), [(torch.float32, "cpu"), (torch.float16, "cpu"), (torch.bfloat16, "cuda")]
)
@pytest.mark.parametrize("wanted", [True, False, None])
def test_amx_concerns_bfloat16_on_the_cpu_alone(
    has_amx: bool, dtype: torch.dtype, device: str, wanted: bool | None
) -> None:
    assert numerics.possible_mode(wanted, dtype, torch.device(device)) is wanted


def test_unasked_never_by_torchs_own_attention(folder: Path) -> None:
    assert not _runner(folder, attention_backend="torch").numerics.deterministic
    assert _runner(folder, attention_backend="torch", deterministic=True).numerics.deterministic


def test_the_fingerprint_tells_other_bits_of_the_linears(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    first = _runner(folder, deterministic=True).fingerprint
    assert _runner(folder, deterministic=True).fingerprint == first
    monkeypatch.setattr(RowCounts, "digest", b"other")
    assert _runner(folder, deterministic=True).fingerprint != first
    assert len(first) == 16
