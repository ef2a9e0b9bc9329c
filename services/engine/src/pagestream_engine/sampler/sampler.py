"""Chooses each row's next token: greedy rows by argmax, the others by Gumbel-max, all rows in one pass."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass

import torch
from torch import Tensor

from pagestream_engine.request.sequence import Sequence
from pagestream_engine.sampler.adjust import adjusted_logits
from pagestream_engine.sampler.filters import apply_filters
from pagestream_engine.sampler.logprobs import ranked, raw_logprobs
from pagestream_engine.sampler.noise import gumbel
from pagestream_engine.scheduler.base import RankedToken, SampledTokens


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """The parameters of the rows that are sampled, as columns."""

    rows: Tensor
    """(rows,) int64: their place in the batch."""
    seeds: Tensor
    positions: Tensor
    """(rows,) int64: index of the new token within its output."""
    temperatures: Tensor
    """(rows, 1) float32, above 0."""
    top_k: Tensor | None
    """(rows,) int64, vocabulary size where all tokens stay; None where no row filters so."""
    top_p: Tensor | None
    min_p: Tensor | None


@dataclass(frozen=True, slots=True)
class AdjustedRows:
    """Rows whose logits differ from the model's by bias or penalties."""

    rows: list[int]
    logits: Tensor
    """(rows, vocab_size) float32."""


def sample(logits: Tensor, seqs: Rows[Sequence], eos_token_ids: Rows[int]) -> SampledTokens:
    """Sample one token for each row.

    Order of operations, as vLLM's: log probabilities of the logits as they are; minimum length, bias, penalties;
    temperature, min-p, top-k, top-p. What no row asks for costs nothing.

    Args:
        logits: (rows, vocab_size), of any float dtype; may be overwritten.
        seqs: the sequence of each row; parameters, seed and tokens count.
        eos_token_ids: the model's, banned until `min_tokens`.

    Returns:
        The token of each row, and log probabilities where they are asked for.
    """
    special = [row for row, seq in enumerate(seqs) if seq.params.is_special]
    reported = [row for row in special if seqs[row].params.logprobs is not None]
    logprobs = raw_logprobs(logits, reported) if reported else None
    _ban_ends(logits, seqs, eos_token_ids)
    changed = [row for row in special if seqs[row].params.changes_logits]
    adjusted = AdjustedRows(changed, adjusted_logits(logits, seqs, changed)) if changed else None
    tokens = _largest(logits)
    if adjusted is not None:
        tokens[adjusted.rows] = _largest(adjusted.logits)
    sampled = [row for row, seq in enumerate(seqs) if not seq.params.is_greedy]
    if sampled:
        columns = _columns(seqs, sampled, logits)
        tokens[columns.rows] = _gumbel_max(_wide(logits, sampled, columns, adjusted), columns)
    return SampledTokens(
        tokens.tolist(), {} if logprobs is None else _reported_tokens(logprobs, tokens, seqs, reported)
    )


def _reported_tokens(
    logprobs: Tensor, tokens: Tensor, seqs: Rows[Sequence], rows: list[int]
) -> dict[int, list[RankedToken]]:
    """By row of `rows`: the chosen token and the likeliest ones, with their log probabilities."""
    vocab_size = logprobs.shape[-1]
    counts = [vocab_size if (given := seqs[row].params.logprobs) is None or given < 0 else given for row in rows]
    return dict(zip(rows, ranked(logprobs, tokens[rows], counts), strict=True))


def _wide(logits: Tensor, sampled: list[int], columns: SamplingRows, adjusted: AdjustedRows | None) -> Tensor:
    """(sampled rows, vocab_size) float32, adjusted where they are to be; may be overwritten."""
    wide = logits[columns.rows].float()
    if adjusted is not None:
        place_of = {row: place for place, row in enumerate(sampled)}
        pairs = [(place_of[row], index) for index, row in enumerate(adjusted.rows) if row in place_of]
        if pairs:
            places, indices = torch.tensor(pairs, device=logits.device).unbind(1)
            wide[places] = adjusted.logits[indices]
    return wide


def _gumbel_max(wide: Tensor, columns: SamplingRows) -> Tensor:
    scaled = wide.div_(columns.temperatures)
    apply_filters(scaled, top_k=columns.top_k, top_p=columns.top_p, min_p=columns.min_p)
    return _largest(scaled.add_(gumbel(columns.seeds, columns.positions, wide.shape[-1])))


def _largest(logits: Tensor) -> Tensor:
    """(rows,): the lowest id among each row's largest. By `max`, at a sixth of what `argmax` takes in bfloat16."""
    return logits.max(dim=-1).indices


def _columns(seqs: Rows[Sequence], sampled: list[int], logits: Tensor) -> SamplingRows:
    device, vocab_size = logits.device, logits.shape[-1]
    params = [seqs[row].params for row in sampled]

    def column(values: list[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    top_k = [one.top_k if 0 < one.top_k < vocab_size else vocab_size for one in params]
    top_p, min_p = [one.top_p for one in params], [one.min_p for one in params]
    return SamplingRows(
        rows=torch.tensor(sampled, device=device),
        seeds=torch.tensor([seqs[row].seed for row in sampled], dtype=torch.int64, device=device),
        positions=torch.tensor([seqs[row].num_output_tokens for row in sampled], dtype=torch.int64, device=device),
        temperatures=column([one.temperature for one in params], torch.float32)[:, None],
        top_k=torch.tensor(top_k, device=device) if min(top_k) < vocab_size else None,
        top_p=column(top_p, torch.float32) if min(top_p) < 1.0 else None,
        min_p=column(min_p, torch.float32) if max(min_p) > 0.0 else None,
    )


def _ban_ends(logits: Tensor, seqs: Rows[Sequence], eos_token_ids: Rows[int]) -> None:
    """Until `min_tokens`, neither an end-of-sequence token that would count nor a stop token can be chosen."""
    rows: list[int] = []
    banned: list[int] = []
    for row, seq in enumerate(seqs):
        params = seq.params
        if seq.num_output_tokens >= params.min_tokens:
            continue
        ends = {*(params.stop_token_ids or ()), *(() if params.ignore_eos else eos_token_ids)}
        ends = {token_id for token_id in ends if token_id < logits.shape[-1]}
        rows += [row] * len(ends)
        banned += sorted(ends)
    if rows:
        logits[torch.tensor(rows), torch.tensor(banned)] = -torch.inf
