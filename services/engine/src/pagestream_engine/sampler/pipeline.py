"""The stages of one step, in their order: from the model's logits to tokens and log probabilities."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pagestream_engine.sampler.draw import Draw, Drawn, largest
from pagestream_engine.sampler.logprobs import rank_tokens, raw_logprobs
from pagestream_engine.sampler.sampled import LogprobTensors
from pagestream_engine.sampler.selection import ReportedRows, Selection
from pagestream_engine.sampler.stages.token_mask import TokenMasks, apply_token_masks


class Chosen(NamedTuple):
    """A token for each row, and the log probabilities that were asked for."""

    drawn: Drawn
    logprobs: LogprobTensors | None


def choose(logits: Tensor, selection: Selection, positions: Tensor, masks: TokenMasks | None, draw: Draw) -> Chosen:
    """Choose a token for each row; nothing that is given changes.

    Args:
        logits: (rows, vocab_size) of any float dtype.
        positions: of all rows of the batch: index of each row's next token within its output.
        masks: those that `selection` was made with.
        draw: draws from logits and noise.
    """
    drawn = _from_copies(logits, selection, positions, masks, draw) if selection.num_copied else largest(logits)
    return Chosen(drawn, None if selection.reported is None else _report(logits, drawn.token_ids, selection.reported))


def _from_copies(
    logits: Tensor, selection: Selection, positions: Tensor, masks: TokenMasks | None, draw: Draw
) -> Drawn:
    changed = _copies(logits, selection.copied)
    if masks is not None and selection.masked is not None:
        apply_token_masks(changed, selection.masked, masks.bits)
    for stage, rows in selection.stages:
        stage.apply(changed, rows)
    all_rows = _plain(logits) if selection.has_plain else _empty(logits)
    if selection.greedy is not None:
        _put(all_rows, selection.greedy.samples, largest(changed[selection.greedy.copies]))
    rest = selection.drawn
    if rest is not None:
        own = changed if rest.copies is None else changed[rest.copies]
        _put(all_rows, rest.samples, draw(own, rest.params, positions[rest.rows]))
    return all_rows


def _copies(logits: Tensor, places: Tensor | None) -> Tensor:
    """(rows, vocab_size) float32, contiguous, to be changed."""
    if places is not None:
        return logits[places].float()
    return torch.empty_like(logits, dtype=torch.float32, memory_format=torch.contiguous_format).copy_(logits)


def _plain(logits: Tensor) -> Drawn:
    values, token_ids = largest(logits)
    return Drawn(values.float(), token_ids)


def _empty(logits: Tensor) -> Drawn:
    shape, device = logits.shape[:1], logits.device
    return Drawn(torch.empty(shape, device=device), torch.empty(shape, dtype=torch.int64, device=device))


def _put(all_rows: Drawn, samples: Tensor, drawn: Drawn) -> None:
    all_rows.values[samples] = drawn.values
    all_rows.token_ids[samples] = drawn.token_ids


def _report(logits: Tensor, token_ids: Tensor, reported: ReportedRows) -> LogprobTensors:
    ranked = rank_tokens(raw_logprobs(logits, reported.samples), token_ids[reported.samples], reported.most)
    return LogprobTensors(reported.host_samples, reported.counts, *ranked)
