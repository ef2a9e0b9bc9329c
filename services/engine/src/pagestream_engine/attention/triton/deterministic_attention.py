"""Attention by the Triton kernels whose bits for a token depend on its sequence alone.

Prefill and decode add in different orders, each the same for a token in any batch and any chunk. So what decides is
which of them computes a token: prompts are computed by prefill, outputs by decode, also where they are computed again.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch
from pagestream_kernels.decode_plan import FIXED_SPLIT_TOKENS, MAX_QUERY_LEN
from torch import Tensor

from pagestream_engine.attention.base import AttentionBatch
from pagestream_engine.attention.triton.attention import (
    DecodeMetadata,
    PrefillMetadata,
    TritonAttention,
    TritonMetadata,
    prepare_decode,
)
from pagestream_engine.plan import Int64Array
from pagestream_engine.transfers import to_device

_MAX_PIECES = 4096
"""Pieces of one token and one fixed split in a launch that replays: 68 MB of scratch with 32 heads of 128."""


class DeterministicTritonAttention(TritonAttention):
    """Prompts by the prefill kernel, everything after them by the decode kernel with fixed splits.

    A chunk that computes outputs of a sequence again, after it was preempted or resumed elsewhere, goes through the
    decode kernel in pieces of up to 16 tokens, which have the bits of single decodes.
    """

    is_deterministic = True
    prefill_equals_decode = False
    split_tokens: ClassVar[int | None] = FIXED_SPLIT_TOKENS

    def prepare(self, batch: AttentionBatch, block_size: int) -> TritonMetadata:
        prompts = _prompt_tokens(batch)
        if prompts is None:
            return super().prepare(batch, block_size)
        query_lens, starts = _int64(batch.query_lens), _int64(batch.seq_lens) - _int64(batch.query_lens)
        order, places = _prompts_first(query_lens, prompts, batch.table_rows.device)
        decodes = _replays(batch, query_lens - prompts, starts + prompts)
        count = batch.num_prefills
        if count < len(batch.seq_lens):
            seq_lens, cu_query_lens = batch.lengths_on_device()
            decodes.append(prepare_decode(batch, seq_lens[count:], cu_query_lens))
        return TritonMetadata(_prefill(batch, prompts, starts), decodes, order, places)


def _prompt_tokens(batch: AttentionBatch) -> Int64Array | None:
    """(sequences,): how many of each sequence's tokens are of its prompt; None where it is all of every prefill."""
    count = batch.num_prefills
    if batch.prompt_lens is None or not count:
        return None
    query_lens, seq_lens = _int64(batch.query_lens[:count]), _int64(batch.seq_lens[:count])
    beyond = np.clip(seq_lens - _int64(batch.prompt_lens[:count]), 0, query_lens)
    if not beyond.any():
        return None
    return np.concatenate((query_lens - beyond, np.zeros(len(batch.seq_lens) - count, np.int64)))


def _prompts_first(query_lens: Int64Array, prompts: Int64Array, device: torch.device) -> tuple[Tensor, Tensor]:
    """Order packed tokens so that those of prompts come first. Return (tokens,) int64: the order, and its inverse."""
    owners = np.repeat(np.arange(len(query_lens)), query_lens)
    offsets = np.arange(len(owners)) - (query_lens.cumsum() - query_lens)[owners]
    order = np.argsort(offsets >= prompts[owners], kind="stable")
    return _to_device(order, device), _to_device(np.argsort(order), device)


def _prefill(batch: AttentionBatch, prompts: Int64Array, starts: Int64Array) -> PrefillMetadata | None:
    """Prepare the prompts' tokens of each sequence, from its first new one at `starts`."""
    (seqs,) = prompts.nonzero()
    if not len(seqs):
        return None
    counts, device = prompts[seqs], batch.table_rows.device
    return PrefillMetadata(
        block_tables=batch.block_tables,
        table_rows=batch.table_rows.index_select(0, _to_device(seqs, device)),
        cu_query_lens=_to_device(_running_sum(counts), device),
        seq_lens=_to_device((starts[seqs] + counts).astype(np.int32), device),
        plans={},
        num_tokens=int(counts.sum()),
    )


def _replays(batch: AttentionBatch, counts: Int64Array, starts: Int64Array) -> list[DecodeMetadata]:
    """Prepare the outputs that prefills compute again: so many of each sequence, from `starts` on.

    A launch has as many pieces of 16 tokens as its scratch is bounded to.
    """
    num_prefills, device = batch.num_prefills, batch.table_rows.device
    pieces = [
        (seq, first, min(MAX_QUERY_LEN, counts[seq] - first))
        for seq in range(num_prefills)
        for first in range(0, int(counts[seq]), MAX_QUERY_LEN)
    ]
    num_splits = -(-int((starts + counts)[:num_prefills].max()) // FIXED_SPLIT_TOKENS)
    at_once = max(1, _MAX_PIECES // (MAX_QUERY_LEN * num_splits))
    launches = []
    for begin in range(0, len(pieces), at_once):
        seqs, firsts, lengths = np.array(pieces[begin : begin + at_once], np.int64).T
        seq_lens = starts[seqs] + firsts + lengths
        launches.append(
            DecodeMetadata(
                block_tables=batch.block_tables,
                table_rows=batch.table_rows.index_select(0, _to_device(seqs, device)),
                seq_lens=_to_device(seq_lens.astype(np.int32), device),
                cu_query_lens=_to_device(_running_sum(lengths), device),
                max_query_len=MAX_QUERY_LEN,
                num_tokens=int(lengths.sum()),
                max_seq_len=int(seq_lens.max()),
            )
        )
    return launches


def _running_sum(counts: Int64Array) -> np.ndarray:
    return np.concatenate(((0,), counts.cumsum())).astype(np.int32)


def _int64(numbers: object) -> Int64Array:
    return np.array(numbers, np.int64)


def _to_device(numbers: np.ndarray, device: torch.device) -> Tensor:
    return to_device(torch.from_numpy(np.ascontiguousarray(numbers)), device)
