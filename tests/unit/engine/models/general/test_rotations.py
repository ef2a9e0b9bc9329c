"""Rotations that would follow a batch's longest sequence keep to one length, or are refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from pagestream_engine.errors import UnsupportedModel
from pagestream_engine.layers.rope import RopeContext
from pagestream_engine.models.general.rotations import shortest_context
from pagestream_engine.models.select import open_model
from pagestream_engine.models.source import Target
from support.engines.architectures import small_config, write_model

_LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
    "original_max_position_embeddings": 32,
}


def test_the_context_is_that_of_the_shortest_rotation() -> None:
    nested = {"full_attention": _LONG_ROPE, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    assert shortest_context(SimpleNamespace(rope_parameters=nested), 256) == RopeContext(32, 256)
    assert shortest_context(SimpleNamespace(rope_parameters=_LONG_ROPE), 256) == RopeContext(32, 256)
    assert shortest_context(SimpleNamespace(), 256) == RopeContext(256, 256)


def test_modelling_code_with_a_choice_of_its_own_ends_at_the_original_context(tmp_path: Path) -> None:
    scaling = {**_LONG_ROPE, "short_mscale": 1.0, "long_mscale": 1.5}
    config = small_config("phimoe", rope_parameters=scaling)
    config.save_pretrained(tmp_path)
    write_model(tmp_path, config)
    with torch.inference_mode():
        assert open_model(tmp_path).attention_specs(Target(torch.float32, torch.device("cpu"), 32))
        with pytest.raises(UnsupportedModel, match="at most 32: beyond it the modelling code rotates all"):
            open_model(tmp_path).attention_specs(Target(torch.float32, torch.device("cpu"), 64))
