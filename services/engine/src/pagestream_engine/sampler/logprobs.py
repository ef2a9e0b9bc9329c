"""Log probabilities of chosen and likeliest tokens, in an order that ties do not leave to chance."""

from __future__ import annotations

from collections.abc import Sequence as Rows

import torch
from torch import Tensor

from pagestream_engine.scheduler.base import RankedToken

_SIGN_BITS, _MAGNITUDE = 31, 0x7FFFFFFF


def raw_logprobs(logits: Tensor, rows: Rows[int]) -> Tensor:
    """(rows, vocab_size) float32: log softmax of these rows as they are, before bias, penalties and temperature."""
    return logits[torch.tensor(rows, device=logits.device)].float().log_softmax(dim=-1)


def ranked(logprobs: Tensor, chosen: Tensor, counts: Rows[int]) -> list[list[RankedToken]]:
    """For each row the chosen token, then the `counts[row]` likeliest ones.

    Equally likely tokens rank by their ids, so that the answer is a function of the row alone: which of them a `topk`
    keeps depends on how many are asked for, which another row of the batch may decide.

    Args:
        logprobs: (rows, vocab_size) float32.
        chosen: (rows,) int64.
        counts: how many of the likeliest are wanted, at least 0 each.
    """
    order = _order(logprobs)
    own = order.gather(1, chosen[:, None])
    ranks = (order > own).sum(dim=-1) + 1
    most = min(max(counts), logprobs.shape[-1])
    best = order.topk(most, dim=-1).indices
    columns = torch.cat((chosen[:, None], best), dim=-1)
    values = logprobs.gather(1, columns).tolist()
    rows = zip(columns.tolist(), values, ranks.tolist(), counts, strict=True)
    return [
        [
            RankedToken(token_id, value, index or rank)
            for index, (token_id, value) in enumerate(zip(ids[: count + 1], row[: count + 1], strict=True))
        ]
        for ids, row, rank, count in rows
    ]


def _order(logprobs: Tensor) -> Tensor:
    """(rows, vocab_size) int64, all different in a row: larger for the likelier token, then for the lower id."""
    bits = logprobs.contiguous().view(torch.int32)
    ascending = bits ^ ((bits >> _SIGN_BITS) & _MAGNITUDE)
    ids = torch.arange(logprobs.shape[-1] - 1, -1, -1, device=logprobs.device)
    return (ascending.long() << 32) | ids
