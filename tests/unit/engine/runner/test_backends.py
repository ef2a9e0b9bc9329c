from __future__ import annotations

import pytest
import torch
from pagestream_engine.config import EngineConfig, EngineOptions
from pagestream_engine.runner.backends import block_size_for


@pytest.mark.parametrize(
    ("options", "device", "expected"),
    [
        ({}, "cpu", 16),
        ({}, "cuda", 64),
        ({"attention_backend": "torch"}, "cuda", 16),
        ({"attention_backend": "triton"}, "cpu", 64),  # interpreted
        ({"block_size": 32}, "cuda", 32),
    ],
)
def test_block_size_suits_the_backend(options: EngineOptions, device: str, expected: int) -> None:
    assert block_size_for(EngineConfig.from_options(options), torch.device(device)) == expected
