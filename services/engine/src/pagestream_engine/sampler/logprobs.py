"""Log probabilities of sampled tokens, and of a prompt's own ones.

Those of a prompt are computed in pieces: it has far more rows of logits than a step's samples.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class RankedTokens(NamedTuple):
    """Of each row the chosen token, then its likeliest ones."""

    token_ids: Tensor
    """(rows, 1 + count) int64."""
    logprobs: Tensor
    """(rows, 1 + count) float32."""
    ranks: Tensor
    """(rows,) int32: the chosen token's place among all, from 1."""


def raw_logprobs(logits: Tensor, rows: Tensor) -> Tensor:
    """(rows, vocab_size) float32: log softmax of these rows as they are, before bias, penalties and temperature."""
    return logits[rows].float().log_softmax(dim=-1)


def rank_tokens(logprobs: Tensor, chosen: Tensor, count: int) -> RankedTokens:
    """Rank each row's chosen token, and find its `count` likeliest ones.

    Equally likely tokens rank by their ids, so that the answer is a function of the row alone: which of them a `topk`
    keeps depends on how many are asked for, which another row of the batch may decide.

    Args:
        logprobs: (rows, vocab_size) float32.
        chosen: (rows,) int64.
        count: at most vocab_size.
    """
    best = _best(logprobs, count) if logprobs.device.type == "cpu" else _best_by_keys(logprobs, count)
    token_ids = torch.cat((chosen[:, None], best), dim=-1)
    return RankedTokens(token_ids, logprobs.gather(1, token_ids), _ranks(logprobs, chosen))


def _ranks(logprobs: Tensor, chosen: Tensor) -> Tensor:
    """(rows,): each chosen token's place, from 1."""
    own = logprobs.gather(1, chosen[:, None])
    ids = torch.arange(logprobs.shape[-1], device=logprobs.device)
    return 1 + _count(logprobs > own) + _count((logprobs == own) & (ids < chosen[:, None]))


def _best_by_keys(logprobs: Tensor, count: int) -> Tensor:
    """As `_best`, with no shape that depends on the data: no two tokens have one key, so that none are tied."""
    vocab_size = logprobs.shape[-1]
    bits = (logprobs + 0.0).view(torch.int32).long()
    # Ordered as the floats are: all bits but the sign's are turned round where they are negative.
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    ids = torch.arange(vocab_size, device=logprobs.device)
    keys = (ordered << 32) | (vocab_size - 1 - ids)
    return vocab_size - 1 - (keys.topk(count, dim=-1).values & 0xFFFFFFFF)


def _best(logprobs: Tensor, count: int) -> Tensor:
    """(rows, count) int64: the likeliest tokens in order. On a CPU faster than by keys, and looks for ties."""
    if not count:
        return torch.empty(len(logprobs), 0, dtype=torch.int64, device=logprobs.device)
    values, found = logprobs.topk(count, dim=-1)
    ids, border = found.sort(dim=-1).values, values[:, -1:]
    tied = (_count(logprobs >= border) > count).nonzero().squeeze(1)
    if len(tied):
        ids[tied] = _best_with_ties(logprobs[tied], border[tied], count)
    order = logprobs.gather(1, ids).sort(dim=-1, descending=True, stable=True).indices
    return ids.gather(1, order)


def _best_with_ties(logprobs: Tensor, border: Tensor, count: int) -> Tensor:
    """(rows, count) int64, ascending: what is likelier than the border, and the lowest ids of those that are at it."""
    above, at_border = logprobs > border, logprobs == border
    wanted = count - _count(above)
    kept = above | (at_border & (at_border.cumsum(dim=-1, dtype=torch.int32) <= wanted[:, None]))
    return kept.nonzero()[:, 1].view(-1, count)


def _count(mask: Tensor) -> Tensor:
    """(rows,) int32. As bytes: ten times as fast on a CPU as a sum of booleans over a vocabulary of 128,000."""
    return mask.view(torch.uint8).sum(dim=-1, dtype=torch.int32)


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
