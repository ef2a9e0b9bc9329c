"""The KV cache of a CPU lies where Linux gives large pages by default."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from pagestream_engine.attention import CacheShape
from pagestream_engine.attention.kv_store import KVStore


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/maps")
def test_the_cache_is_a_private_mapping() -> None:
    store = KVStore([CacheShape((0,), 1, 64, 16, torch.float32)], torch.device("cpu"))
    store.allocate(3000)
    address = store.cache.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, permissions, *_ = line.split()
        begin, end = (int(part, 16) for part in addresses.split("-"))
        if begin <= address < end:
            assert permissions == "rw-p"
            return
    pytest.fail("the cache is not mapped")
