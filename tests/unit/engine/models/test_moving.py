"""Tensors whose memory goes to the host and comes back: whoever holds one, or a view of it, finds it again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pagestream_engine.config import EngineConfig
from pagestream_engine.layers.linear import Linear
from pagestream_engine.layers.linear_methods import PlainMethod
from pagestream_engine.models.offload import moving
from pagestream_engine.models.offload.moving import MovedTensors, tensors_of
from pagestream_engine.runner import ModelRunner
from support.engines.tiny_models import make_model
from torch import nn

CPU = torch.device("cpu")


def test_tensors_come_back_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moving, "_GRANULE_BYTES", 64)
    monkeypatch.setattr(moving, "slab_pages", lambda num_bytes, page_bytes, *, pinned: [1] * (num_bytes // page_bytes))
    matrix, module = torch.randn(7, 9), nn.Sequential(nn.Linear(3, 5), nn.ParameterList([torch.randn(4)]))
    held = {"a": [Linear(PlainMethod(matrix[2:]), matrix[0])], "b": (module, None, 3)}
    num_bytes = sum(each.untyped_storage().nbytes() for each in (matrix, *module.parameters()))
    expected = [each.detach().clone() for each in tensors_of([held])]
    moved = MovedTensors(tensors_of([held]), CPU)
    assert moved.num_bytes == num_bytes
    assert all(each.untyped_storage().nbytes() == 0 for each in tensors_of([held]))
    moved.restore()
    found = list(tensors_of([held]))
    assert len(found) == 5
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    matrix.zero_()
    assert not held["a"][0].method._weight.any(), "a view of what came back"  # type: ignore[index, union-attr]


@pytest.mark.parametrize(
    ("name", "options"),
    [("llama-tied", {}), ("mixtral", {}), ("gemma3", {"quantization": "int8"})],
)
def test_all_weights_of_a_model_are_found(tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    config = EngineConfig.from_options({"dtype": "float32", "deterministic": True, **options})
    runner = ModelRunner(make_model(tmp_path / "model", name), config, CPU)
    found = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors_of([runner._model])}
    assert sum(found.values()) >= runner.memory_bytes()["model"]
