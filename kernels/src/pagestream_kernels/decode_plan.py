"""How one decode step's KV work is cut into splits: on the device, from the lengths, without a word to the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pagestream_kernels.checks import check_dtype, check_shape
from pagestream_kernels.errors import KernelArgumentError
from pagestream_kernels.runtime import cdiv, num_processors

PROGRAMS_PER_PROCESSOR = 4  # programs of 4 warps in flight to hide memory latency; a GPU has not yet confirmed it
MIN_SPLIT_TOKENS = 256  # below this the reduction costs more than the split saves; likewise
SPLIT_MULTIPLE = 64  # tokens; a split ends with a tile


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """The work of one decode step: slot s of the grid reads one split of one sequence.

    The grid's size depends on host values only (number of sequences, heads and processors), so that a captured graph
    can replay it; what each slot does comes from the lengths. One long sequence in a batch of short ones gets many
    slots, so no program ever walks a long context alone.
    """

    split_tokens: Tensor  # (1,) int32: tokens of one split
    slot_seqs: Tensor  # (num_slots,) int32: the sequence of each slot; num_seqs for a slot without work
    seq_slots: Tensor  # (num_seqs + 1,) int32: the first slot of each sequence, then the end

    @property
    def num_slots(self) -> int:
        """Programs per KV head."""
        return self.slot_seqs.shape[0]


def plan_decode(
    seq_lens: Tensor,
    *,
    num_kv_heads: int,
    split_tokens: int | None = None,
    max_seq_len: int | None = None,
    window: int | None = None,
) -> DecodePlan:
    """Cut the KV work of `seq_lens` into splits of equal length; a plan serves every layer of the step.

    Args:
        seq_lens: (num_seqs,) int32.
        num_kv_heads: each slot runs once per KV head.
        split_tokens: None cuts all work evenly over the processors. A number fixes the split, and with it the order
            of the reduction: a sequence's result then does not depend on what else is in the batch.
        max_seq_len: a bound on the lengths; needed with `split_tokens`, to bound the grid.
        window: of the layers that the plan serves: tokens before it are no work.

    Raises:
        KernelArgumentError: a wrong shape or dtype, or a number that is not positive.
    """
    check_dtype("seq_lens", seq_lens, (torch.int32,))
    check_shape("seq_lens", seq_lens, (None,), meaning="(num_seqs,)")
    if num_kv_heads < 1:
        raise KernelArgumentError(f"num_kv_heads: expected at least 1, got {num_kv_heads}")
    lengths = seq_lens.clamp(min=0, max=window).long()
    if split_tokens is None:
        target = cdiv(PROGRAMS_PER_PROCESSOR * num_processors(seq_lens.device), num_kv_heads)
        even = (lengths.sum() + target - 1) // target
        split = ((even + SPLIT_MULTIPLE - 1) // SPLIT_MULTIPLE * SPLIT_MULTIPLE).clamp(min=MIN_SPLIT_TOKENS)
        num_slots = seq_lens.shape[0] + target  # sum of ceil(length / split) over the sequences is at most this
    else:
        if split_tokens < 1 or max_seq_len is None or max_seq_len < 0:
            raise KernelArgumentError(
                f"split_tokens: expected at least 1 and a max_seq_len, got {split_tokens} and {max_seq_len}"
            )
        split = torch.full((), split_tokens, dtype=torch.int64, device=seq_lens.device)
        longest = max_seq_len if window is None else min(max_seq_len, window)
        num_slots = max(1, seq_lens.shape[0] * cdiv(longest, split_tokens))
    ends = ((lengths + split - 1) // split).cumsum(0)
    seq_slots = torch.nn.functional.pad(ends, (1, 0))
    slots = torch.arange(num_slots, device=seq_lens.device)
    return DecodePlan(
        split_tokens=split.reshape(1).int(),
        slot_seqs=torch.searchsorted(ends, slots, right=True).int(),
        seq_slots=seq_slots.int(),
    )
