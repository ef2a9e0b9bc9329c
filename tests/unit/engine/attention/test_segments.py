"""The C++ kernels take long contexts in segments; no way of computing a token changes its bits, at any level."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Iterator
from functools import cache

import pytest
import torch
from pagestream_engine.attention import AttentionSpec, select
from pagestream_engine.attention.kv_store import LayerCache
from pagestream_engine.attention.native.calls import NativeKernels, PagedLayer
from pagestream_engine.attention.native.levels import LEVELS, AttentionLevel, library_for
from pagestream_engine.cpu import instruction_sets, read_cpuinfo
from pagestream_engine.native_build import cached, find_compiler
from support.engines.attention_cases import TOLERANCES, Sequences, make_backend, outputs_in_chunks
from support.kernels.cases import case_id
from support.pairwise import Case, pairwise, sampled

DIM = 48  # three vectors: the last pair of them is half empty
LENGTHS = (700, 530, 40)
BORDERS = [0, 7, 250, 255, 256, 257, 258, 300, 511, 512, 513, 515, 697, 698, 699, 700]
"""Chunks, decodes (one token), and both around the segments' borders at 256 and 512."""
OPTIONS = {
    "dtype": ("float32", "bfloat16", "float16"),
    "heads": ((6, 2), (8, 1), (3, 3)),
    "window": (None, 20, 300),
    "soft_cap": (None, 3.0),
    "sinks": (False, True),
}
LEVELS_HERE = [level for level in LEVELS.get(platform.machine(), ()) if level.flags <= instruction_sets(read_cpuinfo())]

pytestmark = [
    pytest.mark.builds,
    pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler"),
]


@pytest.fixture(scope="module", params=sampled(LEVELS_HERE), ids=lambda level: level.name)
def level(request: pytest.FixtureRequest) -> Iterator[AttentionLevel]:
    """Each level of this processor, the one that it uses first, in whose library the backend's kernels are."""
    given: AttentionLevel = request.param

    @cache
    def load(head_dim: int, cache_dtype: torch.dtype | None = None) -> ctypes.CDLL:
        assert cache_dtype is None, "the model's"
        return ctypes.CDLL(str(cached(library_for(head_dim, given))))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(select, "load_library", load)
        yield given


@pytest.fixture(autouse=True)
def keep_threads() -> Iterator[None]:
    """Restore the number of threads."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_value_that_is_not_finite_reaches_only_who_sees_it(
    level: AttentionLevel, dtype: torch.dtype, window: int | None, value: float
) -> None:
    """Blocks of a prompt that are computed before such a token are shared: another's failure must not be in them."""
    num_tokens, at = 40, 23
    keys, values = torch.randn(2, 1, 2, 64, DIM).to(dtype)
    values[0, 1, at, 7] = value
    query = torch.randn(num_tokens, 4, DIM).to(dtype)
    spec = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=DIM, scale=DIM**-0.5, window=window)
    layer = PagedLayer(LayerCache(keys, values), torch.zeros(1, 1, dtype=torch.int32), spec)
    kernels = NativeKernels(select.load_library(DIM), dtype)
    together, alone = torch.empty_like(query), torch.empty_like(query)
    kernels.attend(together, query, layer, torch.tensor([[0, 0, 0, num_tokens]]))
    kernels.attend(alone, query, layer, torch.tensor([[0, token, token, 1] for token in range(num_tokens)]))
    sees = [token for token in range(num_tokens) if at <= token and (window is None or token < at + window)]
    expected = torch.zeros(num_tokens, 4, DIM, dtype=torch.bool)
    expected[sees, 2:, 7] = True
    assert torch.equal(together.isfinite(), ~expected)
    assert torch.equal(together.nan_to_num(posinf=1.0), alone.nan_to_num(posinf=1.0))


@pytest.mark.parametrize("case", pairwise(OPTIONS), ids=case_id)
def test_chunks_decodes_threads_and_neighbours_change_no_bit(level: AttentionLevel, case: Case) -> None:
    seqs = Sequences({**case, "head_dim": DIM, "block_size": 16, "rotation": None, "scale": None}, LENGTHS)
    backend = make_backend("native", [seqs.shape], torch.device("cpu"))
    torch.set_num_threads(1)
    together = outputs_in_chunks(seqs, backend, [0, 700])
    tolerance = TOLERANCES[case["dtype"]]
    for seq, output in enumerate(together):
        expected = seqs.expected((seq, 0, LENGTHS[seq]))
        torch.testing.assert_close(output.double(), expected, atol=tolerance, rtol=tolerance)
    torch.set_num_threads(3)
    for whole, parts in zip(together, outputs_in_chunks(seqs, backend, BORDERS), strict=True):
        assert torch.equal(whole, parts)


def test_a_context_is_divided_among_more_threads_than_kv_heads(level: AttentionLevel) -> None:
    """A single sequence with one KV head: its segments are tasks of their own where there are several threads."""
    # float32: rounding to less would hide sums that differ.
    case = {"dtype": "float32", "heads": (4, 1), "window": None, "soft_cap": None, "sinks": True}
    seqs = Sequences({**case, "head_dim": DIM, "block_size": 16, "rotation": None, "scale": None}, (1500,))
    backend = make_backend("native", [seqs.shape], torch.device("cpu"))
    outputs = []
    for threads in (1, 2, 7):
        torch.set_num_threads(threads)
        outputs.append(outputs_in_chunks(seqs, backend, [0, *range(1490, 1501)])[0])
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


def test_decodes_in_bfloat16_have_the_bits_of_a_prompt(level: AttentionLevel) -> None:
    """Large scores, whose errors are large: with usual ones, rounding to bfloat16 hides sums that differ."""
    case = {"dtype": "bfloat16", "heads": (6, 2), "window": None, "soft_cap": None, "sinks": False, "scale": 3.0}
    seqs = Sequences({**case, "head_dim": DIM, "block_size": 16, "rotation": None}, (560, 540))
    backend = make_backend("native", [seqs.shape], torch.device("cpu"))
    torch.set_num_threads(1)
    whole = outputs_in_chunks(seqs, backend, [0, 560])
    decoded = outputs_in_chunks(seqs, backend, [0, *range(300, 561)])
    for expected, actual in zip(whole, decoded, strict=True):
        assert torch.equal(expected, actual)
