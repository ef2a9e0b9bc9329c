"""Sampling of rows of which some have a grammar: each waits for the mask of its next token, under a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from pagestream_engine.errors import InvariantViolation
from pagestream_engine.features.grammar.compiler import GrammarCompiler, MaskJob, bits_of, num_words
from pagestream_engine.features.grammar.matcher import RowMatcher
from pagestream_engine.sampler import Sampled, SamplingBatch, TokenMasks
from pagestream_engine.sampler.stages import TokenIds
from pagestream_engine.sampling_params import SamplingParams
from pagestream_engine.transfers import download, to_device

Agree = Callable[[Sequence[float]], Sequence[float]]
"""Returns the numbers of the first of the ranks that sample the same rows."""
_BEHIND_LIMIT_S = 60.0
"""Of the wait for masks that the first rank has already: this one has computed the same, on a busier processor. Whoever
waits for this rank's step names it sooner as one that hangs; here the step fails."""
_WAITS_ALONE = 5
"""Deadlines that a step waits in which no row can be sampled: to compute it again is no use to anybody."""


class ConstrainedSampling:
    """A sampling batch, and the matchers of its rows.

    Where `matchers` is empty a step takes the batch alone, and doesn't enter this one.

    A row's mask depends on its last token. It is computed by the compiler's threads from the moment that this token is
    known: on a CPU while the step before ends and the next one runs; on a GPU, which may compute that next step already
    when the host learns the token, while its model runs. Sampling waits `wait_s` in all for the masks of a step. A row
    whose mask isn't there then gets no token: it computes its last one again in the next step.

    Args:
        wait_s: of a step.
        agree: ranks measure different times, and must leave out the same rows; None: there is one.
    """

    def __init__(
        self,
        batch: SamplingBatch,
        compiler: GrammarCompiler,
        vocab_size: int,
        device: torch.device,
        *,
        wait_s: float,
        agree: Agree | None = None,
    ) -> None:
        self.batch = batch
        """Whose rows they are."""
        self._compiler = compiler
        self._vocab_size = vocab_size
        self._device = device
        self._wait_s = self._left_s = wait_s
        self._agree = agree
        self.matchers: dict[int, RowMatcher] = {}
        """Of the rows that have a grammar."""
        self._unseen: tuple[list[tuple[int, RowMatcher]], Callable[[], list[Tensor]]] | None = None
        """Matchers by the places of their tokens in the last step that had any, and what waits for these."""

    def begin_step(self) -> None:
        """Let the next step wait for masks anew."""
        self._left_s = self._wait_s

    def forget_rows(self) -> None:
        """Drop what has not begun for rows: others take their place in another batch."""
        for matcher in self.matchers.values():
            matcher.cancel()

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
        """As `SamplingBatch.add`; the row's matcher begins to take the output's tokens."""
        self.batch.add(
            row,
            params,
            seed=seed,
            end_token_ids=end_token_ids,
            prompt_token_ids=prompt_token_ids,
            output_token_ids=output_token_ids,
        )
        if params.structured_outputs is not None:
            matcher = self.matchers[row] = RowMatcher(
                self._compiler,
                params.structured_outputs,
                bits_of(end_token_ids, self._vocab_size),
                np.asarray(output_token_ids).tolist(),
                min_tokens=params.min_tokens,
                ends_late=params.ignore_eos,
                each_s=self._wait_s,
            )
            self._begin([matcher])

    def remove(self, row: int) -> None:
        """As `SamplingBatch.remove`."""
        self.batch.remove(row)
        if (matcher := self.matchers.pop(row, None)) is not None:
            matcher.cancel()

    def sample(self, logits: Tensor, rows: ArrayLike) -> Sampled:
        """As `SamplingBatch.sample`, with the masks of the rows' grammars, and without the rows that lack theirs."""
        self._advance_matchers()
        numbers = np.asarray(rows, dtype=np.int64)
        held = [(place, self.matchers[row]) for place, row in enumerate(numbers.tolist()) if row in self.matchers]
        if not held:
            return self.batch.sample(logits, rows)
        masked = [(place, matcher) for place, matcher in held if not matcher.allows_all]
        missing = self._missing([matcher for _, matcher in masked], is_alone=len(masked) == len(numbers))
        left_out = [place for (place, _), is_missing in zip(masked, missing, strict=True) if is_missing]
        masked = [each for each, is_missing in zip(masked, missing, strict=True) if not is_missing]
        if left_out:
            held = [(place, matcher) for place, matcher in held if place not in set(left_out)]
            sampled = self._sample_some(logits, numbers, masked, left_out)
        else:
            sampled = self.batch.sample(logits, rows, self._masks(masked))
        errors = {place: error for place, matcher in masked if (error := matcher.error) is not None}
        if held:
            self._unseen = held, download([sampled.token_ids])
            if self._device.type == "cpu":
                self._advance_matchers()
        return replace(sampled, errors={**sampled.errors, **errors}) if errors else sampled

    def guess(self, logits: Tensor, rows: ArrayLike, num_ahead: int) -> Tensor:
        """As `SamplingBatch.guess`, without masks: `allowed` drops what a grammar forbids."""
        return self.batch.guess(logits, rows, num_ahead)

    def forced(self, rows: Sequence[int]) -> dict[int, list[int]]:
        """Return the tokens after each row's last one where its grammar leaves one text; see `RowMatcher.forced`."""
        self._advance_matchers()
        held = [(row, self.matchers[row]) for row in rows if row in self.matchers]
        missing = self._missing([matcher for _, matcher in held])
        known = (each for each, is_missing in zip(held, missing, strict=True) if not is_missing)
        return {row: forced for row, matcher in known if (forced := matcher.forced())}

    def allowed(self, drafts: Mapping[int, Sequence[int]]) -> dict[int, Sequence[int]]:
        """Return of each row's drafts the leading ones that its grammar allows after its last token; none where that
        takes too long to find."""
        held = [(row, self.matchers[row]) for row, given in drafts.items() if given and row in self.matchers]
        missing = self._missing([matcher for _, matcher in held])
        checks = {
            row: None if is_missing else matcher.check(drafts[row])
            for (row, matcher), is_missing in zip(held, missing, strict=True)
        }
        jobs = [check.job for check in checks.values() if check is not None and check.job is not None]
        self._compiler.masks.submit(jobs)
        late = iter(self._late(jobs))
        result = dict(drafts)
        for row, check in checks.items():
            if check is None or (check.job is not None and next(late)):
                result[row] = ()
            else:
                result[row] = drafts[row][: check.num_allowed]
        return result

    def _sample_some(
        self, logits: Tensor, rows: NDArray[np.int64], masked: list[tuple[int, RowMatcher]], left_out: list[int]
    ) -> Sampled:
        """Sample the rows that are not left out."""
        kept = np.setdiff1d(np.arange(len(rows)), left_out)
        if not len(kept):
            nothing = torch.zeros(len(rows), device=logits.device)
            return Sampled(nothing.long(), nothing, left_out=tuple(left_out))
        masks = self._masks(masked)
        # A row that is left out must not be sampled at all: its noise position and penalties would move.
        own_masks = None if masks is None else masks.of(kept)
        own_logits = logits.index_select(0, to_device(torch.from_numpy(kept), logits.device))
        sampled = self.batch.sample(own_logits, rows[kept], own_masks)
        errors = {int(kept[place]): error for place, error in sampled.errors.items()}
        return replace(sampled.spread(kept, len(rows), errors), left_out=tuple(left_out))

    def _masks(self, masked: list[tuple[int, RowMatcher]]) -> TokenMasks | None:
        if not masked:
            return None
        bits = np.empty((len(masked), num_words(self._vocab_size)), np.int32)
        for index, (_, matcher) in enumerate(masked):
            matcher.fill(bits[index])
        places = np.array([place for place, _ in masked], np.int64)
        return TokenMasks(places, to_device(torch.from_numpy(bits), self._device))

    def _missing(self, matchers: Sequence[RowMatcher], *, is_alone: bool = False) -> list[bool]:
        """Wait for the masks of some rows, and return which are not there.

        Args:
            is_alone: whether nothing can be done without them.
        """
        if not matchers:
            return []
        jobs = [job for matcher in matchers if (job := matcher.pending()) is not None]
        self._wait(jobs)
        if is_alone and len(jobs) == len(matchers) and not any(job.is_done for job in jobs):
            self._compiler.masks.wait(jobs, _WAITS_ALONE * self._wait_s, for_any=True)
        missing = self._agreed([matcher.pending() for matcher in matchers])
        for matcher, is_missing in zip(matchers, missing, strict=True):
            if not is_missing:
                matcher.pending()  # takes what this rank had to wait for
        return missing

    def _late(self, jobs: Sequence[MaskJob]) -> list[bool]:
        """Wait for some jobs, and return which are not done."""
        if not jobs:
            return []
        self._wait(jobs)
        return self._agreed([None if job.is_done else job for job in jobs])

    def _wait(self, jobs: Sequence[MaskJob]) -> None:
        """Wait for jobs as long as the step may."""
        if jobs:
            started = time.monotonic()
            self._compiler.masks.wait(jobs, self._left_s)
            self._left_s = max(0.0, self._left_s - (time.monotonic() - started))

    def _agreed(self, pending: Sequence[MaskJob | None]) -> list[bool]:
        """Return which jobs the first rank lacks; wait for those that this one lacks alone."""
        if self._agree is None:
            return [job is not None for job in pending]
        is_missing = [bool(number) for number in self._agree([float(job is not None) for job in pending])]
        own = [job for job, is_left_out in zip(pending, is_missing, strict=True) if job is not None and not is_left_out]
        self._compiler.masks.wait(own, _BEHIND_LIMIT_S)
        if not all(job.is_done for job in own):
            raise InvariantViolation(
                f"masks that the first rank has are not computed here within {_BEHIND_LIMIT_S:g} s"
            )
        return is_missing

    def _advance_matchers(self) -> None:
        """Take the tokens of the last step that had rows with a grammar, and begin with the masks after them."""
        if self._unseen is None:
            return
        (held, wait), self._unseen = self._unseen, None
        token_ids = wait()[0].tolist()
        for place, matcher in held:
            matcher.take(token_ids[place])
        self._begin([matcher for _, matcher in held])

    def _begin(self, matchers: Sequence[RowMatcher]) -> None:
        self._compiler.masks.submit([job for matcher in matchers if (job := matcher.job()) is not None])
