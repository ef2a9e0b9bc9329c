"""The sampling batch: the sampling state of every running sequence, resident on the device, and one call a step."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from pagestream_engine.errors import InvariantViolation
from pagestream_engine.out_of_memory import is_out_of_memory
from pagestream_engine.sampler.columns import RowColumns
from pagestream_engine.sampler.draw import draw_for, largest
from pagestream_engine.sampler.pipeline import Chosen, choose
from pagestream_engine.sampler.sampled import Sampled
from pagestream_engine.sampler.selection import HostRows, Places, Selection, select
from pagestream_engine.sampler.stages.allowed_tokens import AllowedTokens
from pagestream_engine.sampler.stages.bad_words import BadWords
from pagestream_engine.sampler.stages.logit_bias import LogitBias
from pagestream_engine.sampler.stages.min_tokens import MinTokens
from pagestream_engine.sampler.stages.penalties import Penalties
from pagestream_engine.sampler.stages.stage import LogitsStage, NewRow, TokenIds
from pagestream_engine.sampler.stages.token_mask import TokenMasks
from pagestream_engine.sampling_params import SamplingParams

_log = logging.getLogger(__name__)

_STAGES: tuple[type[LogitsStage], ...] = (AllowedTokens, BadWords, MinTokens, LogitBias, Penalties)
"""In the order in which they are applied: vLLM's. A token mask comes before them."""
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
        self._stages = [stage(max_rows, vocab_size, device) for stage in _STAGES]
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
        new = NewRow(params, end_token_ids, prompt_token_ids, output_token_ids)
        self._is_taken[row] = True
        self._num_edits += 1
        self._columns.write(row, params, seed, len(output_token_ids))
        self._host.write(row, params, self._vocab_size)
        try:
            for stage in self._stages:
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
        for stage in self._stages:
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
        versions = [stage.slots.version for stage in self._stages]
        key = (rows.tobytes(), masked.tobytes(), self._num_edits, *versions)
        if self._selected is None or self._selected[0] != key:
            self._selected = key, select(rows, self._host, self._columns, self._stages, masked)
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
