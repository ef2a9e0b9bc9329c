"""When a model computes deterministically: asked for, or for next to nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pagestream_engine.attention.native.library import find_compiler
from pagestream_engine.config import EngineConfig
from pagestream_engine.layers.row_counts import RowCounts
from pagestream_engine.runner import ModelRunner
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


def test_unasked_never_by_torchs_own_attention(folder: Path) -> None:
    assert not _runner(folder, attention_backend="torch").numerics.deterministic
    assert _runner(folder, attention_backend="torch", deterministic=True).numerics.deterministic


def test_the_fingerprint_tells_other_bits_of_the_linears(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    first = _runner(folder, deterministic=True).fingerprint
    assert _runner(folder, deterministic=True).fingerprint == first
    monkeypatch.setattr(RowCounts, "digest", b"other")
    assert _runner(folder, deterministic=True).fingerprint != first
    assert len(first) == 16
