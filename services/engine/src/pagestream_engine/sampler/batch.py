"""The sampling batch: the sampling state of every running sequence, resident on the device, and one call a step.

Which of a step's rows take part in what is settled on the host (`Selection`) and kept while the same rows are sampled
again; then the stages run in their order, from the model's logits to tokens and log probabilities (`choose`). A
sequence has up to four numbers: its row in the batch, its sample among the rows of this step, its copy among the
samples whose logits change, and its slot in the state of each stage that it uses. Of rows 0, 1 and 5, a step samples
1 and 5, and 5 alone has penalties: row 1 is sample 0, without a copy; row 5 is sample 1, copy 0, and slot 0 of
`Penalties`. The draw itself is one kernel, `filter_and_draw` on a GPU: see draw.py.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from pagestream_engine.errors import InvariantViolation, RequestFault, is_out_of_memory
from pagestream_engine.sampler.draw import Draw, Drawn, DrawParams, draw_for, largest
from pagestream_engine.sampler.logprobs import rank_tokens, raw_logprobs
from pagestream_engine.sampler.stages import (
    STAGES,
    LogitsStage,
    NewRow,
    StageRows,
    TokenIds,
    TokenMasks,
    apply_token_masks,
)
from pagestream_engine.sampling_params import ALL_LOGPROBS, SamplingParams
from pagestream_engine.transfers import to_device

_log = logging.getLogger(__name__)

_NO_PLACES: Places = np.zeros(0, dtype=np.int64)


class SamplingBatch:
    """Sampling state of up to `max_rows` sequences, each in a row of its own.

    `add` and `remove` edit it between steps; `sample` advances it on the device, so that a row may be sampled again
    before the host has seen its last token. On a device, `sample` waits for nothing that the device computes.

    Args:
        max_rows: most sequences at a time; rows are 0 to `max_rows - 1`.
    """

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self._device = device
        self._vocab_size = vocab_size
        self._columns = RowColumns(max_rows, vocab_size, device)
        self._host = HostRows.empty(max_rows)
        self._is_taken = np.zeros(max_rows, dtype=np.bool_)
        self._stages = [stage(max_rows, vocab_size, device) for stage in STAGES]
        self._stages_of: dict[int, list[LogitsStage]] = {}
        """Of the rows that ask for some."""
        self._draw = draw_for(device)
        self._num_edits = 0
        self._selected: tuple[tuple[object, ...], Selection] | None = None

    # -- rows --

    def add(
        self,
        row: int,
        params: SamplingParams,
        *,
        seed: int,
        end_token_ids: Collection[int],
        prompt_token_ids: TokenIds,
        output_token_ids: TokenIds,
    ) -> None:
        """Take a sequence.

        Args:
            row: one that is free.
            params: of its request; token ids in them lie in the vocabulary.
            seed: of its noise, 64 bits signed.
            output_token_ids: what it has generated; its next token is the one after them.

        Raises:
            InvariantViolation: the row is taken.
        """
        if self._is_taken[row]:
            raise InvariantViolation(f"row {row} of the sampling batch is taken")
        self._is_taken[row] = True
        self._num_edits += 1
        self._columns.write(row, params, seed, len(output_token_ids))
        self._host.write(row, params, self._vocab_size)
        stages = [stage for stage in self._stages if getattr(params, stage.asked_by)]
        if not stages:
            return
        self._stages_of[row] = stages
        new = NewRow(params, end_token_ids, prompt_token_ids, output_token_ids)
        try:
            for stage in stages:
                stage.add(row, new)
        except Exception:
            self.remove(row)
            raise

    def remove(self, row: int) -> None:
        """Forget a sequence.

        Raises:
            InvariantViolation: the row is free.
        """
        if not self._is_taken[row]:
            raise InvariantViolation(f"row {row} of the sampling batch is free")
        self._is_taken[row] = False
        self._num_edits += 1
        for stage in self._stages_of.pop(row, ()):
            stage.remove(row)

    # -- a step --

    def sample(self, logits: Tensor, rows: ArrayLike, masks: TokenMasks | None = None) -> Sampled:
        """Sample one token for each row, and count it.

        Order of operations, as vLLM's: log probabilities of the logits as they are; token mask, allowed tokens, bad
        words, minimum length, bias, penalties; temperature, min-p, top-k, top-p. What no row asks for costs nothing.
        What a row's sampling raises is its own error: the others are sampled without it. Out of memory is the step's.

        Args:
            logits: (rows, vocab_size) of any float dtype; left as they are.
            rows: (rows,) integers on the host (an array, or a tensor of a CPU), all taken and different.
            masks: of rows whose grammar allows some tokens only.

        Raises:
            InvariantViolation: a row is not taken.
        """
        sampled = np.asarray(rows, dtype=np.int64)
        if False in self._is_taken[sampled].tolist():
            raise InvariantViolation(f"rows {sampled[~self._is_taken[sampled]].tolist()} of the batch are free")
        try:
            selection, chosen = self._choose(logits, sampled, masks)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            _log.exception("sampling of %d rows failed; each is tried alone", len(sampled))
            return self._sample_those_that_can(logits, sampled, masks)
        return self._advance(selection, chosen)

    def guess(self, logits: Tensor, rows: ArrayLike, num_ahead: int) -> Tensor:
        """Return (rows,) int64 the tokens that `sample` would give from these logits after `num_ahead` more tokens,
        whose penalties and the like are not counted. The state stays as it is; where sampling raises, or the logits
        are not finite, a token is any.

        Args:
            logits: (rows, vocab_size) of any float dtype, of a draft model.
            rows: as for `sample`.
            num_ahead: tokens between each row's next one and its guess.
        """
        guessed = np.asarray(rows, dtype=np.int64)
        try:
            selection = replace(self._select(guessed, None), reported=None)
            chosen = choose(logits, selection, self._columns.positions + num_ahead, None, self._draw)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            _log.debug("guesses for %d rows failed", len(guessed), exc_info=error)
            return largest(logits).token_ids.clamp_(0, self._vocab_size - 1)
        return chosen.drawn.token_ids.clamp_(0, self._vocab_size - 1)

    def _choose(self, logits: Tensor, rows: Places, masks: TokenMasks | None) -> tuple[Selection, Chosen]:
        """Choose a token for each row; the state stays as it is."""
        selection = self._select(rows, masks)
        return selection, choose(logits, selection, self._columns.positions, masks, self._draw)

    def _advance(self, selection: Selection, chosen: Chosen) -> Sampled:
        """Count the tokens. What this raises fails the step: some of the state has moved."""
        (values, token_ids), logprobs = chosen
        for stage, stage_rows in selection.stages:
            stage.advance(token_ids[stage_rows.samples], stage_rows)
        if selection.drawn is not None:
            self._columns.advance(selection.drawn.rows)
        return Sampled(token_ids, values, logprobs, bans=selection.bans)

    def _select(self, rows: Places, masks: TokenMasks | None) -> Selection:
        """Return the last selection where it is of the same rows with the same state."""
        masked = _NO_PLACES if masks is None else masks.places
        stages = self._stages if self._stages_of else ()
        versions = [stage.slots.version for stage in stages]
        key = (rows.tobytes(), masked.tobytes(), self._num_edits, *versions)
        if self._selected is None or self._selected[0] != key:
            self._selected = key, select(rows, self._host, self._columns, stages, masked)
        return self._selected[1]

    def _sample_those_that_can(self, logits: Tensor, rows: Places, masks: TokenMasks | None) -> Sampled:
        """Try each row alone, with nothing kept of it; then sample those that have raised nothing."""
        errors: dict[int, str] = {}
        for place in range(len(rows)):
            one = np.array([place])
            own_masks = None if masks is None else masks.of(one)
            try:
                self._choose(logits[place : place + 1], rows[one], own_masks)
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                errors[place] = f"{type(error).__name__}: {error}"
        whole = np.array([place for place in range(len(rows)) if place not in errors], dtype=np.int64)
        own_masks = None if masks is None else masks.of(whole)
        sampled = self._advance(*self._choose(logits[torch.from_numpy(whole)], rows[whole], own_masks))
        return sampled.spread(whole, len(rows), errors)


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
        stages: in the order in which they are applied; empty where no row of the batch asks for one.
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


class RowColumns:
    """What temperature, filters and noise need of each row. Rows are overwritten one by one, never all."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self._floats = torch.zeros(max_rows, 3, dtype=torch.float32, device=device)
        self._integers = torch.zeros(max_rows, 3, dtype=torch.int64, device=device)
        self.temperatures, self.top_p, self.min_p = self._floats.unbind(1)
        self.top_k, self.seeds, self.positions = self._integers.unbind(1)
        """top_k: the vocabulary's size where all tokens stay. positions: index of the next token in its output, of rows
        that are drawn; the noise depends on it."""

    def write(self, row: int, params: SamplingParams, seed: int, position: int) -> None:
        """Overwrite a row."""
        device = self._floats.device
        floats = torch.tensor((params.temperature, params.top_p, params.min_p))
        top_k = params.top_k if 0 < params.top_k < self.vocab_size else self.vocab_size
        integers = torch.tensor((top_k, seed, position))
        self._floats[row] = to_device(floats, device)
        self._integers[row] = to_device(integers, device)

    def advance(self, rows: Tensor) -> None:
        """Count one token for each of `rows` (rows,) int64."""
        self.positions.index_add_(0, rows, torch.ones_like(rows))


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
    if selection.has_plain:
        all_rows = _plain(logits)
    else:
        shape, device = logits.shape[:1], logits.device
        all_rows = Drawn(torch.empty(shape, device=device), torch.empty(shape, dtype=torch.int64, device=device))
    if selection.greedy is not None:
        _scatter(all_rows, selection.greedy.samples, largest(changed[selection.greedy.copies]))
    rest = selection.drawn
    if rest is not None:
        own = changed if rest.copies is None else changed[rest.copies]
        _scatter(all_rows, rest.samples, draw(own, rest.params, positions[rest.rows]))
    return all_rows


def _copies(logits: Tensor, places: Tensor | None) -> Tensor:
    """(rows, vocab_size) float32, contiguous, to be changed."""
    if places is not None:
        return logits[places].float()
    return torch.empty_like(logits, dtype=torch.float32, memory_format=torch.contiguous_format).copy_(logits)


def _plain(logits: Tensor) -> Drawn:
    values, token_ids = largest(logits)
    return Drawn(values.float(), token_ids)


def _scatter(all_rows: Drawn, samples: Tensor, drawn: Drawn) -> None:
    all_rows.values[samples] = drawn.values
    all_rows.token_ids[samples] = drawn.token_ids


def _report(logits: Tensor, token_ids: Tensor, reported: ReportedRows) -> LogprobTensors:
    ranked = rank_tokens(raw_logprobs(logits, reported.samples), token_ids[reported.samples], reported.most)
    return LogprobTensors(reported.host_samples, reported.counts, *ranked)


class DrawFault(IntEnum):
    """Why a row's token is none."""

    NOT_FINITE = 1
    NOTHING_ALLOWED = 2

    @property
    def message(self) -> str:
        """What to tell a request that is not to blame."""
        return "the model gave logits that are not finite numbers"

    def blame(self, bans: Sequence[str]) -> str:
        """Return what to tell a request: a RequestFault where its own fields leave no token.

        Args:
            bans: fields of the request that ban tokens at this place of its output.
        """
        if self is DrawFault.NOT_FINITE or not bans:
            return self.message
        together = "together they ban" if len(bans) > 1 else "it bans"
        return RequestFault(f"{', '.join(bans)}: no token may be chosen to go on with: {together} all of them")


@dataclass(frozen=True, slots=True)
class LogprobTensors:
    """Log probabilities of some rows' chosen and likeliest tokens, on the device of the logits."""

    places: NDArray[np.int64]
    """(rows,): their places among the sampled rows."""
    counts: NDArray[np.int64]
    """(rows,): how many of the likeliest tokens each row asked for; the columns beyond belong to others."""
    token_ids: Tensor
    """(rows, 1 + most) int64: the chosen token, then the likeliest ones in order."""
    logprobs: Tensor
    """(rows, 1 + most) float32."""
    ranks: Tensor
    """(rows,) int32: the chosen token's place among all, from 1; equally likely ones by their ids."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """One token for each row, on the device of the logits."""

    token_ids: Tensor
    """(rows,) int64."""
    values: Tensor
    """(rows,) of any float dtype: what each token was chosen by. Where it is not finite the token means nothing, and
    the row's request has failed."""
    logprobs: LogprobTensors | None = None
    """Of the rows that asked for them; None where none did."""
    errors: Mapping[int, str] = field(default_factory=dict)
    """By place: what a row's sampling has raised. Its token means nothing; the other rows are whole."""
    left_out: tuple[int, ...] = ()
    """Places of rows that were not sampled, for their grammars' masks are not there yet. Their tokens mean nothing, and
    their state stays as it is."""
    bans: Mapping[int, Sequence[str]] = field(default_factory=dict)
    """By place: fields of a row's request that ban tokens."""

    def draw_faults(self) -> dict[int, DrawFault]:
        """By place: what is wrong with the tokens that mean nothing. Waits for the device."""
        values = self.values.tolist()
        if all(map(math.isfinite, values)):
            return {}
        return {
            place: DrawFault.NOTHING_ALLOWED if value == -math.inf else DrawFault.NOT_FINITE
            for place, value in enumerate(values)
            if not math.isfinite(value)
        }

    def spread(self, places: NDArray[np.int64], num_rows: int, errors: Mapping[int, str]) -> Sampled:
        """Return the result for `num_rows` rows of which these are at `places`; `errors` are the others'."""
        index = torch.from_numpy(places).to(self.token_ids.device)
        token_ids, values = self.token_ids.new_zeros(num_rows), self.values.new_zeros(num_rows)
        token_ids[index], values[index] = self.token_ids, self.values
        logprobs = None if self.logprobs is None else replace(self.logprobs, places=places[self.logprobs.places])
        bans = {int(places[place]): fields for place, fields in self.bans.items()}
        return Sampled(token_ids, values, logprobs, errors, bans=bans)
