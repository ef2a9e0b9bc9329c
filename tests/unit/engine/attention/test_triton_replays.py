"""How deterministic attention by the Triton kernels divides a step: prompts to prefill, outputs to decode."""

from __future__ import annotations

import pytest
import torch
from pagestream_engine.attention import AttentionBatch, CacheShape
from pagestream_engine.attention.kv_store import KVStore
from pagestream_engine.attention.triton import deterministic_attention
from pagestream_engine.attention.triton.attention import TritonMetadata
from pagestream_engine.attention.triton.deterministic_attention import DeterministicTritonAttention

SPANS = [(0, 10, 10), (30, 20, 40), (5, 3, 20), (0, 40, 6), (77, 1, 50)]
"""Of each sequence: tokens before the new ones, new tokens, tokens of its prompt. The last one decodes."""


FIRST_ROW = 3
"""Of the sequences' rows in the resident table."""


def _prepare(spans: list[tuple[int, int, int]], num_prefills: int) -> TritonMetadata:
    store = KVStore([CacheShape((0,), 1, 16, 8, torch.float32)], torch.device("cpu"))
    batch = AttentionBatch(
        positions=torch.cat([torch.arange(start, start + count) for start, count, _ in spans]),
        slots=torch.zeros(sum(count for _, count, _ in spans), dtype=torch.int64),
        block_tables=torch.zeros(8, 20, dtype=torch.int32),
        table_rows=FIRST_ROW + torch.arange(len(spans)),
        query_lens=[count for _, count, _ in spans],
        seq_lens=[start + count for start, count, _ in spans],
        num_prefills=num_prefills,
        prompt_lens=[prompt for _, _, prompt in spans],
    )
    return DeterministicTritonAttention(store).prepare(batch, 8)


@pytest.mark.parametrize("most_pieces", [4096, 32])
def test_each_token_goes_to_the_kernel_of_its_kind(monkeypatch: pytest.MonkeyPatch, most_pieces: int) -> None:
    monkeypatch.setattr(deterministic_attention, "_MAX_PIECES", most_pieces)
    found = _prepare(SPANS, 4)
    packed = [(seq, place) for seq, (start, count, _) in enumerate(SPANS) for place in range(start, start + count)]
    assert found.order is not None
    assert found.places is not None
    assert found.order[found.places].tolist() == list(range(len(packed)))
    ordered = [packed[index] for index in found.order.tolist()]
    prompts = [(seq, place) for seq, place in packed if place < SPANS[seq][2]]
    assert ordered == prompts + [token for token in packed if token not in prompts]

    prefill = found.prefill
    assert prefill is not None
    assert prefill.num_tokens == len(prompts)
    assert prefill.table_rows.tolist() == [FIRST_ROW + seq for seq in range(4)]
    assert prefill.cu_query_lens.tolist() == [0, 10, 20, 23, 29]
    assert prefill.seq_lens.tolist() == [10, 40, 8, 6]
    computed = []
    for decode in found.decodes:
        starts = [0, 1] if decode.cu_query_lens is None else decode.cu_query_lens.tolist()
        assert decode.num_tokens == starts[-1]
        assert len(starts) - 1 <= max(1, most_pieces // 16)
        for index, (seq, end) in enumerate(
            zip((decode.table_rows - FIRST_ROW).tolist(), decode.seq_lens.tolist(), strict=True)
        ):
            length = starts[index + 1] - starts[index]
            assert 1 <= length <= decode.max_query_len <= 16
            assert end <= decode.max_seq_len
            computed += [(seq, place) for place in range(end - length, end)]
    assert computed == ordered[len(prompts) :]
    assert len(found.decodes) == (2 if most_pieces == 4096 else 3)


def test_a_step_without_outputs_that_are_computed_again_is_left_as_it_is() -> None:
    found = _prepare([(0, 10, 10), (30, 5, 40), (77, 1, 50)], 2)
    assert found.order is None
    assert found.prefill is not None
    assert found.prefill.num_tokens == 15
    assert [decode.num_tokens for decode in found.decodes] == [1]
