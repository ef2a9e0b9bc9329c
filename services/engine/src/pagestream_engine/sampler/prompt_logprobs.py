"""Log probabilities of a prompt's own tokens, in pieces: a prompt has far more rows of logits than a step's samples."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pagestream_engine.sampler.logprobs import RankedTokens, rank_tokens

BYTES_PER_LOGIT = 64
"""Most that a piece takes for each of its logits at a time: the logits, float32, their logarithms, and int64 keys to
rank them by, with the temporaries of each."""


def prompt_logprobs(
    hidden: Tensor,
    next_token_ids: Tensor,
    count: int,
    logits_of: Callable[[Tensor], Tensor],
    *,
    vocab_size: int,
    max_bytes: int,
) -> RankedTokens:
    """Rank the token that follows each of a prompt's tokens, and the likeliest ones in its place.

    Logits are made for as many rows at a time as `max_bytes` allow, at least one; a row's result is the same in any
    piece, as far as its logits are.

    Args:
        hidden: (tokens, hidden_size): the model's output for consecutive tokens of the prompt.
        next_token_ids: (tokens,) int64: the token after each.
        count: how many of the likeliest are wanted; beyond `vocab_size`, all.
        logits_of: makes (rows, vocab_size) logits of (rows, hidden_size).
        max_bytes: bound of a piece's temporaries.

    Returns:
        For (tokens,) rows. The prompt's first token has no row: nothing comes before it.
    """
    num_rows = num_rows_within(max_bytes, vocab_size)
    count = min(count, vocab_size)
    pieces = [
        rank_tokens(logits_of(rows).float().log_softmax(dim=-1), targets, count)
        for rows, targets in zip(torch.split(hidden, num_rows), torch.split(next_token_ids, num_rows), strict=True)
    ]
    return RankedTokens(*(torch.cat(parts) for parts in zip(*pieces, strict=True)))


def num_rows_within(max_bytes: int, vocab_size: int) -> int:
    """Return how many rows of logits a piece has."""
    return max(1, max_bytes // (vocab_size * BYTES_PER_LOGIT))
