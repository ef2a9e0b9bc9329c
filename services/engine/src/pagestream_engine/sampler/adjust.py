"""Logit bias and penalties: what changes the logits before any token is chosen, greedy or not."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Rows

import torch
from torch import Tensor

from pagestream_engine.request.sequence import Sequence
from pagestream_engine.request.token_counts import TokenCounts


def adjusted_logits(logits: Tensor, seqs: Rows[Sequence], rows: Rows[int]) -> Tensor:
    """The logits of some rows with their bias, then their penalties.

    As vLLM: bias; repetition penalty (Keskar et al. 2019, arXiv:1909.05858) on every token of prompt and output;
    frequency and presence penalty on the output's.

    Args:
        logits: (rows of the batch, vocab_size), of any float dtype; left as they are.
        seqs: the sequence of each row of the batch.
        rows: which rows are wanted.

    Returns:
        (rows, vocab_size) float32.
    """
    wanted = [seqs[row] for row in rows]
    adjusted = logits[torch.tensor(rows, device=logits.device)].float()
    _add_bias(adjusted, wanted)
    _penalise(adjusted, wanted)
    return adjusted


def _add_bias(logits: Tensor, seqs: Rows[Sequence]) -> None:
    token_ids, biases = array("q"), array("f")
    lengths = []
    for seq in seqs:
        bias = seq.params.logit_bias or {}
        token_ids.extend(bias)
        biases.extend(bias.values())
        lengths.append(len(bias))
    if token_ids:
        places = _places(lengths, token_ids, logits.device)
        logits[places] += torch.frombuffer(biases, dtype=torch.float32).to(logits.device)


def _penalise(logits: Tensor, seqs: Rows[Sequence]) -> None:
    token_ids, counts = array("q"), array("f")
    lengths = []
    for seq in seqs:
        counted = _counts_of(seq) if seq.params.has_penalties else None
        if counted is not None:
            token_ids.extend(counted.token_ids)
            counts.extend(counted.counts)
        lengths.append(0 if counted is None else len(counted.token_ids))
    if not token_ids:
        return
    places = _places(lengths, token_ids, logits.device)
    repetition, frequency, presence = (column[places[0]] for column in _penalties(seqs, logits.device))
    occurred = torch.frombuffer(counts, dtype=torch.float32).to(logits.device)
    values = logits[places]
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= frequency * occurred
    values -= presence * (occurred > 0)
    logits[places] = values


def _penalties(seqs: Rows[Sequence], device: torch.device) -> list[Tensor]:
    """Repetition, frequency and presence penalty of each row, (rows,) float32."""
    rows = [(seq.params.repetition_penalty, seq.params.frequency_penalty, seq.params.presence_penalty) for seq in seqs]
    return list(torch.tensor(rows, dtype=torch.float32, device=device).unbind(1))


def _counts_of(seq: Sequence) -> TokenCounts:
    """The sequence's own counts, up to date."""
    counts = seq.token_counts
    if counts is None:
        # Only the repetition penalty looks at the prompt.
        counts = seq.token_counts = TokenCounts(with_prompt=seq.params.repetition_penalty != 1.0)
    counts.catch_up(seq.token_ids, seq.num_prompt_tokens)
    return counts


def _places(lengths: list[int], token_ids: array[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Row and column of each entry, where row i has `lengths[i]` of the tokens; no place twice."""
    rows = torch.repeat_interleave(torch.tensor(lengths))
    return rows.to(device), torch.frombuffer(token_ids, dtype=torch.int64).to(device)
