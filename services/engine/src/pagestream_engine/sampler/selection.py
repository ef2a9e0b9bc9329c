"""Which of a step's rows take part in what: settled on the host, kept while the same rows are sampled again.

A sequence has up to four numbers: its row in the batch, its sample among the rows of this step, its copy among the
samples whose logits change, and its slot in the state of each stage that it uses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagestream_engine.sampler.columns import RowColumns
from pagestream_engine.sampler.draw import DrawParams
from pagestream_engine.sampler.stages.stage import LogitsStage, StageRows
from pagestream_engine.sampling_params import ALL_LOGPROBS, SamplingParams
from pagestream_engine.transfers import to_device

Places = NDArray[np.int64]
_UNREPORTED = -1


@dataclass(frozen=True, slots=True)
class HostRows:
    """What the host knows of each row of the batch, so that it need not ask the device."""

    is_greedy: NDArray[np.bool_]
    has_top_k: NDArray[np.bool_]
    has_top_p: NDArray[np.bool_]
    has_min_p: NDArray[np.bool_]
    num_logprobs: NDArray[np.int64]
    """How many of the likeliest tokens are reported; -1 where not even the chosen one is."""

    @staticmethod
    def empty(max_rows: int) -> HostRows:
        """Return `max_rows` greedy rows."""
        return HostRows(
            is_greedy=np.ones(max_rows, dtype=np.bool_),
            has_top_k=np.zeros(max_rows, dtype=np.bool_),
            has_top_p=np.zeros(max_rows, dtype=np.bool_),
            has_min_p=np.zeros(max_rows, dtype=np.bool_),
            num_logprobs=np.full(max_rows, _UNREPORTED, dtype=np.int64),
        )

    def write(self, row: int, params: SamplingParams, vocab_size: int) -> None:
        """Overwrite a row."""
        self.is_greedy[row] = params.is_greedy
        self.has_top_k[row] = 0 < params.top_k < vocab_size
        self.has_top_p[row] = params.top_p < 1.0
        self.has_min_p[row] = params.min_p > 0.0
        wanted = vocab_size if params.logprobs == ALL_LOGPROBS else params.logprobs
        self.num_logprobs[row] = _UNREPORTED if wanted is None else min(wanted, vocab_size)


@dataclass(frozen=True, slots=True)
class DrawnRows:
    """The rows whose tokens are drawn by noise."""

    copies: Tensor | None
    """(rows,) int64 among the copied rows; None where they are all of them, in order."""
    samples: Tensor
    """(rows,) int64 among the sampled rows."""
    rows: Tensor
    """(rows,) int64 in the batch."""
    params: DrawParams


@dataclass(frozen=True, slots=True)
class GreedyRows:
    """The rows whose logits change, and whose token is the likeliest."""

    copies: Tensor
    """(rows,) int64 among the copied rows."""
    samples: Tensor
    """(rows,) int64 among the sampled rows."""


@dataclass(frozen=True, slots=True)
class ReportedRows:
    """The rows whose log probabilities are asked for."""

    host_samples: Places
    """(rows,) among the sampled rows, on the host."""
    samples: Tensor
    """The same on the device."""
    counts: Places
    """(rows,): how many of the likeliest tokens each asked for."""
    most: int
    """The largest of `counts`."""


@dataclass(frozen=True, slots=True)
class Selection:
    """One step's rows. All tensors are on the device of the logits."""

    rows: Tensor
    """(sampled,) int64 in the batch."""
    has_plain: bool
    """Whether there are rows whose token is the largest of the model's own logits."""
    copied: Tensor | None
    """(copied,) int64 among the sampled: rows whose logits are changed, as float32 copies; None where all are."""
    num_copied: int
    stages: Sequence[tuple[LogitsStage, StageRows]]
    masked: Tensor | None
    """(masks,) int64 among the copied rows: the row of each token mask."""
    greedy: GreedyRows | None
    drawn: DrawnRows | None
    reported: ReportedRows | None
    bans: Mapping[int, Sequence[str]]
    """By place among the sampled rows: fields of a request that ban tokens."""


def select(
    rows: Places, host: HostRows, columns: RowColumns, stages: Sequence[LogitsStage], masked: Places
) -> Selection:
    """Settle who takes part in what.

    Args:
        rows: (sampled,) rows of the batch.
        columns: of all rows, on the device.
        stages: in the order in which they are applied.
        masked: (masks,) places among `rows` that have a token mask.
    """
    device = columns.seeds.device
    slots_of = [(stage, stage.slots.of(rows)) for stage in stages]
    is_drawn = ~host.is_greedy[rows]
    is_copied = is_drawn.copy()
    is_copied[masked] = True
    for _, slots in slots_of:
        is_copied |= slots >= 0
    copied = is_copied.nonzero()[0]
    copy_of = is_copied.cumsum() - 1
    greedy = (is_copied & ~is_drawn).nonzero()[0]
    return Selection(
        rows=_put(rows, device),
        has_plain=len(copied) < len(rows),
        copied=None if len(copied) == len(rows) else _put(copied, device),
        num_copied=len(copied),
        stages=[(stage, _stage_rows(slots, copy_of, device)) for stage, slots in slots_of if (slots >= 0).any()],
        masked=_put(copy_of[masked], device) if len(masked) else None,
        greedy=GreedyRows(_put(copy_of[greedy], device), _put(greedy, device)) if len(greedy) else None,
        drawn=_drawn(is_drawn, rows, copy_of, host, columns),
        reported=_reported(host.num_logprobs[rows], columns.vocab_size, device),
        bans=_bans(slots_of, masked),
    )


def _bans(slots_of: Sequence[tuple[LogitsStage, Places]], masked: Places) -> Mapping[int, Sequence[str]]:
    bans: dict[int, list[str]] = {place: ["structured_outputs"] for place in masked.tolist()}
    for stage, slots in slots_of:
        if stage.bans_by is not None:
            for place in (slots >= 0).nonzero()[0].tolist():
                bans.setdefault(place, []).append(stage.bans_by)
    return bans


def _stage_rows(slots: Places, copy_of: Places, device: torch.device) -> StageRows:
    samples = (slots >= 0).nonzero()[0]
    own = slots[samples]
    return StageRows(_put(copy_of[samples], device), _put(samples, device), _put(own, device), own)


def _drawn(
    is_drawn: NDArray[np.bool_], rows: Places, copy_of: Places, host: HostRows, columns: RowColumns
) -> DrawnRows | None:
    samples = is_drawn.nonzero()[0]
    if not len(samples):
        return None
    device, own = columns.seeds.device, rows[samples]
    of_batch = _put(own, device)
    params = DrawParams(
        temperatures=columns.temperatures[of_batch],
        seeds=columns.seeds[of_batch],
        top_k=columns.top_k[of_batch] if host.has_top_k[own].any() else None,
        top_p=columns.top_p[of_batch] if host.has_top_p[own].any() else None,
        min_p=columns.min_p[of_batch] if host.has_min_p[own].any() else None,
    )
    num_copied = int(copy_of[-1]) + 1
    copies = None if len(samples) == num_copied else _put(copy_of[samples], device)
    return DrawnRows(copies, _put(samples, device), of_batch, params)


def _reported(num_logprobs: Places, vocab_size: int, device: torch.device) -> ReportedRows | None:
    samples = (num_logprobs != _UNREPORTED).nonzero()[0]
    if not len(samples):
        return None
    counts = np.minimum(num_logprobs[samples], vocab_size)
    return ReportedRows(samples, _put(samples, device), counts, int(counts.max()))


def _put(places: Places, device: torch.device) -> Tensor:
    return to_device(torch.from_numpy(places), device)
