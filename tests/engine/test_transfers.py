"""What is packed for one copy is what comes out of it. On a CPU: pinned memory and events need a GPU (tests/gpu)."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from pagestream_engine.transfers import PackedUpload, pack, unpack

CPU = torch.device("cpu")
ARRAYS = st.lists(st.tuples(st.sampled_from([(0,), (1,), (7,), (2, 3), (4100,), (5, 2000)]), st.booleans()), max_size=5)


@given(steps=st.lists(ARRAYS, min_size=1, max_size=4))
def test_a_packed_upload_gives_what_it_was_given(steps: list[list[tuple[tuple[int, ...], bool]]]) -> None:
    packed, rng = PackedUpload(CPU), np.random.default_rng(0)
    sent = []
    for shapes in steps:
        arrays = [
            rng.integers(-(2**31), 2**31, shape).astype(np.int32 if is_narrow else np.int64)
            for shape, is_narrow in shapes
        ]
        sent.append((packed.send(arrays), [torch.from_numpy(array.astype(np.int64)) for array in arrays]))
    for found, expected in sent:  # the buffers were used again meanwhile
        assert len(found) == len(expected)
        assert all(a.dtype == torch.int64 and torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_results_come_back_in_their_shapes_as_32_bits() -> None:
    tensors = [
        torch.tensor([5, 2**31 - 1, -1]),
        torch.tensor([1.5, -torch.inf, torch.nan], dtype=torch.bfloat16),
        torch.empty(0, 4),
        torch.arange(6, dtype=torch.int32).view(2, 3),
        torch.randn(4, 3).T,
    ]
    found = unpack(pack(tensors), [(tensor.shape, tensor.is_floating_point()) for tensor in tensors])
    for tensor, back in zip(tensors, found, strict=True):
        assert back.dtype == (torch.float32 if tensor.is_floating_point() else torch.int32)
        torch.testing.assert_close(back, tensor.to(back.dtype), rtol=0, atol=0, equal_nan=True)
