"""Rows to sample, without an engine: a batch is made for each call."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from pagestream_engine.request.sampling_params import SamplingParams
from pagestream_engine.sampler import LogprobTensors, SamplingBatch
from pagestream_engine.sampler.stages.stage import LogitsStage, NewRow, StageRows
from torch import Tensor


@dataclass
class GivenRow:
    """A sequence as the sampler sees it."""

    params: SamplingParams
    seed: int = 7
    prompt: Sequence[int] = (1, 2, 3)
    output: list[int] = field(default_factory=list)

    def ends(self, eos_token_ids: Iterable[int]) -> frozenset[int]:
        return frozenset(self.params.stop_token_ids or ()) | frozenset(() if self.params.ignore_eos else eos_token_ids)


class RankedToken(NamedTuple):
    """A token, its log probability, and its rank where it is among the likeliest, or the chosen one."""

    token_id: int
    logprob: float
    rank: int


class SampledRows(NamedTuple):
    """A token for each row, and by row the log probabilities that were asked for."""

    token_ids: list[int]
    logprobs: dict[int, list[RankedToken]]


def sample_rows(logits: Tensor, rows: Sequence[GivenRow], eos_token_ids: Iterable[int] = ()) -> SampledRows:
    """Sample each row once."""
    batch = SamplingBatch(len(rows), logits.shape[-1], logits.device)
    for index, row in enumerate(rows):
        batch.add(
            index,
            row.params,
            seed=row.seed,
            end_token_ids=row.ends(eos_token_ids),
            prompt_token_ids=row.prompt,
            output_token_ids=row.output,
        )
    sampled = batch.sample(logits, np.arange(len(rows)))
    assert not sampled.errors
    return SampledRows(sampled.token_ids.tolist(), {} if sampled.logprobs is None else as_lists(sampled.logprobs))


def as_lists(given: LogprobTensors) -> dict[int, list[RankedToken]]:
    """Logprobs by place: the chosen token, then the likeliest ones."""
    rows = zip(given.token_ids.tolist(), given.logprobs.tolist(), given.ranks.tolist(), given.counts, strict=True)
    lists = [
        [RankedToken(*token, index or rank) for index, token in enumerate(zip(ids[: count + 1], values, strict=False))]
        for ids, values, rank, count in rows
    ]
    return dict(zip(given.places.tolist(), lists, strict=True))


def apply_stage(kind: type[LogitsStage], logits: Tensor, rows: Sequence[GivenRow], eos: Iterable[int] = ()) -> Tensor:
    """Return float32 copies of the logits that went through one stage."""
    stage = kind(len(rows), logits.shape[-1], logits.device)
    for index, row in enumerate(rows):
        stage.add(index, NewRow(row.params, row.ends(eos), row.prompt, row.output))
    slots = stage.slots.of(np.arange(len(rows)))
    places = (slots >= 0).nonzero()[0]
    changed = logits.float().clone()
    if len(places):
        index = torch.from_numpy(places)
        stage.apply(changed, StageRows(index, index, torch.from_numpy(slots[places]), slots[places]))
    return changed
