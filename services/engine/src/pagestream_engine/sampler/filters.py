"""Which tokens stay: min-p, top-k and top-p, as thresholds on the logits."""

from __future__ import annotations

import torch
from torch import Tensor

_FIRST_LOOK = 1024
"""Largest logits that are looked at before a row is sorted whole: a sort of 64 rows costs far more than a topk."""


def apply_filters(logits: Tensor, *, top_k: Tensor | None, top_p: Tensor | None, min_p: Tensor | None) -> None:
    """Set what does not stay to -inf, in place, in the order min-p, top-k, top-p.

    Each filter keeps all logits at or above a threshold, so that ties at its border stay together and no outcome
    depends on how a sort orders equal values. The likeliest token always stays.

    Args:
        logits: (rows, vocab_size) float32, after temperature.
        top_k: (rows,) int64, at least 1: this many stay; the vocabulary's size keeps all. None: no row filters.
        top_p: (rows,) float32 in (0, 1]: the fewest likeliest tokens with at least this probability stay; 1 keeps all.
        min_p: (rows,) float32 in [0, 1]: what is less likely than this times the likeliest goes; 0 keeps all.
    """
    if min_p is not None:
        floor = logits.amax(dim=-1, keepdim=True) + min_p.log()[:, None]
        logits.masked_fill_(logits < floor, -torch.inf)
    if top_k is not None or top_p is not None:
        logits.masked_fill_(logits < _threshold(logits, top_k, top_p)[:, None], -torch.inf)


def _threshold(logits: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> Tensor:
    """(rows,): the smallest logit that stays; -inf where all do.

    A row that its largest logits do not settle is sorted whole, alone: no row's outcome depends on the others.
    """
    vocab_size = logits.shape[-1]
    ks = logits.new_full((len(logits),), vocab_size, dtype=torch.int64) if top_k is None else top_k
    ps = logits.new_ones(len(logits)) if top_p is None else top_p
    if logits.device.type != "cpu":
        # A device would have to be waited for to know which rows are settled.
        return _threshold_within(logits.sort(dim=-1, descending=True).values, logits, ks, ps)[0]
    looked = min(vocab_size, _FIRST_LOOK)
    threshold, settled = _threshold_within(logits.topk(looked, dim=-1).values, logits, ks, ps)
    left = (~settled).nonzero().squeeze(1)
    if len(left):
        rows = logits[left]
        ordered = rows.sort(dim=-1, descending=True).values
        threshold[left] = _threshold_within(ordered, rows, ks[left], ps[left])[0]
    return threshold


def _threshold_within(largest: Tensor, logits: Tensor, top_k: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """Each row's threshold as far as its largest logits (descending) show it, and whether they do, (rows,) each."""
    looked, vocab_size = largest.shape[-1], logits.shape[-1]
    limited = top_k < vocab_size
    border = largest.gather(1, top_k.clamp(max=looked)[:, None] - 1).squeeze(1)
    border = border.masked_fill(~limited, -torch.inf)
    kept = largest.masked_fill(largest < border[:, None], -torch.inf)
    total = torch.where(limited, _logsumexp(kept), _logsumexp(logits))
    mass = (kept - total[:, None]).exp().cumsum(dim=-1)
    # A token stays while the probability before it is below top_p.
    before = torch.cat((torch.zeros_like(mass[:, :1]), mass[:, :-1]), dim=-1)
    stays = (before < top_p[:, None]) & (kept > -torch.inf)
    last = kept.gather(1, stays.sum(dim=-1, keepdim=True).clamp_(min=1) - 1).squeeze(1)
    nucleus = top_p < 1.0
    whole = looked == vocab_size
    settled = (~limited | (top_k < looked)) & (~nucleus | limited | (mass[:, -1] >= top_p))
    return torch.where(nucleus, last, border), settled | whole


def _logsumexp(rows: Tensor) -> Tensor:
    """Each row's, whatever is beside it: torch adds up a single long row by threads, and so in another order."""
    return rows.repeat(2, 1).logsumexp(dim=-1)[:1] if len(rows) == 1 else rows.logsumexp(dim=-1)
