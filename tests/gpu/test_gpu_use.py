"""The GPU utilization and memory that a worker reads from a real GPU."""

import os

import pytest
import torch

pytest.importorskip("tokenizers")  # the worker imports the engine

from pagestream_worker.gpu import gpu_use

pytestmark = pytest.mark.gpu


def test_memory_follows_what_is_allocated() -> None:
    if not torch.cuda.is_available():
        if "gpu" in os.environ.get("PAGESTREAM_REQUIRE", "").split(","):
            pytest.fail("torch finds no GPU, and PAGESTREAM_REQUIRE asks for one")
        pytest.skip("torch finds no GPU")
    torch.cuda.synchronize()
    before = gpu_use()
    held = torch.zeros(1 << 30, dtype=torch.uint8, device="cuda")
    after = gpu_use()
    assert before is not None
    assert after is not None
    assert after.memory_bytes - before.memory_bytes >= held.numel()
    assert after.utilization is None or 0 <= after.utilization <= 1
