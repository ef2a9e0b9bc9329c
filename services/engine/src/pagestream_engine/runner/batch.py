"""From the scheduler's lists to tensors: all prefill chunks and decodes of a step packed into one batch."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from pagestream_engine.attention import AttentionBatch
from pagestream_engine.request.sequence import Sequence
from pagestream_engine.scheduler.base import ScheduledStep


@dataclass(frozen=True, slots=True)
class ModelBatch:
    """What one forward pass takes."""

    token_ids: Tensor
    """(tokens,) int64, packed: prefill chunks, then decodes."""
    attention: AttentionBatch
    sample_rows: Tensor
    """(samples,) int64: the packed rows whose next token is wanted."""
    sample_seqs: list[Sequence]
    """Who gets a token."""
    sample_logits: Tensor | None
    """(sample_seqs,) int64: for each of them the place in `sample_rows` that it samples from; None where that is its
    own, in the same order."""


def build_batch(step: ScheduledStep, block_size: int, device: torch.device) -> ModelBatch:
    """Pack a step that holds at least one sequence."""
    scheduled = [*step.prefills, *step.decodes]
    token_ids: list[int] = []
    query_lens, seq_lens = [], []
    for item in scheduled:
        computed = item.seq.num_computed_tokens
        token_ids += item.seq.token_ids[computed : computed + item.num_new_tokens]
        query_lens.append(item.num_new_tokens)
        seq_lens.append(computed + item.num_new_tokens)
    ends = list(accumulate(query_lens))
    rows = [end - 1 for end, item in zip(ends, scheduled, strict=True) if item.needs_sample]
    tables = _pad([item.seq.block_table for item in scheduled], seq_lens, block_size)
    positions, slots = _places(tables, query_lens, seq_lens, block_size)
    attention = AttentionBatch(
        positions=positions.to(device, non_blocking=True),
        slots=slots.to(device, non_blocking=True),
        block_tables=tables.to(device, non_blocking=True),
        query_lens=query_lens,
        seq_lens=seq_lens,
        num_prefills=len(step.prefills),
    )
    return ModelBatch(
        token_ids=torch.tensor(token_ids, dtype=torch.int64).to(device, non_blocking=True),
        attention=attention,
        sample_rows=torch.tensor(rows, dtype=torch.int64).to(device, non_blocking=True),
        sample_seqs=step.sampled(),
        sample_logits=_shared_logits(step, device),
    )


def _shared_logits(step: ScheduledStep, device: torch.device) -> Tensor | None:
    """Siblings that start from one prompt sample from one row of logits: see `ModelBatch.sample_logits`."""
    if not any(chunk.siblings for chunk in step.prefills):
        return None
    counts = [1 + len(chunk.siblings) for chunk in step.prefills if chunk.needs_sample] + [1] * len(step.decodes)
    return torch.repeat_interleave(torch.tensor(counts)).to(device, non_blocking=True)


def _pad(tables: list[list[int]], seq_lens: list[int], block_size: int) -> Tensor:
    """(sequences, most blocks) int32; of each table only the blocks that hold tokens."""
    counts = [-(-seq_len // block_size) for seq_len in seq_lens]
    width = max(counts)
    rows = [table[:count] + [0] * (width - count) for table, count in zip(tables, counts, strict=True)]
    return torch.tensor(rows, dtype=torch.int32)


def _places(tables: Tensor, query_lens: list[int], seq_lens: list[int], block_size: int) -> tuple[Tensor, Tensor]:
    """Position of each packed token in its sequence, and its slot in the cache; (tokens,) int64 each."""
    lens = torch.tensor(query_lens)
    owners = torch.repeat_interleave(torch.arange(len(query_lens)), lens)
    # A chunk's last token is its sequence's last: count back from both ends.
    shift = torch.tensor(seq_lens) - lens.cumsum(0)
    positions = torch.arange(len(owners)) + shift[owners]
    blocks = tables[owners, positions // block_size].long()
    return positions, blocks * block_size + positions % block_size
