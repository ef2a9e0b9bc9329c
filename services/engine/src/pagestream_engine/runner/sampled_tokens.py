"""Bring the tokens that the last stage of a pipeline samples to the stages that go on from them."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pagestream_engine.parallel.stages import Arriving, Stage
from pagestream_engine.runner.speculation.speculation import Execute
from pagestream_engine.step.pending import PendingResult
from pagestream_engine.step.records import StepPlan, StepResult

_NO_TOKEN = -1


class _Expected(NamedTuple):
    """Tokens of a step that the last stage may not have sampled yet."""

    rows: list[int]
    tokens: Arriving


class SampledTokens:
    """What a step samples, in every stage that needs it.

    Without drafts that is the first one: it goes on with the next step, and waits for a row's token only before a step
    that decodes it. With drafts every stage counts by them how many tokens its rows have, and so waits for those of
    each step at its end.

    Args:
        next_tokens: (rows,) int64 of the batch: the token that each row's next decode computes.
        num_drafts: most drafts of a row in a step; 0 without speculation.
    """

    def __init__(self, stage: Stage, next_tokens: Tensor, num_drafts: int) -> None:
        self._stage = stage
        self._next_tokens = next_tokens
        self._num_drafts = num_drafts
        self._expected: deque[_Expected] = deque()

    def settle(self, plan: StepPlan) -> None:
        """Wait for the tokens of all rows that a plan decodes, adds or removes, before the batch is edited by it."""
        if not self._expected:
            return
        wanted = {*plan.rows[plan.num_prefills :].tolist(), *plan.removed.tolist(), *(new.row for new in plan.added)}
        numbers = [number for number, each in enumerate(self._expected, 1) if plan.reset or wanted & set(each.rows)]
        for _ in range(max(numbers, default=0)):
            expected = self._expected.popleft()
            self._set(expected.rows, expected.tokens()[:, 0])

    def give(self, token_ids: Tensor) -> None:
        """Send what a step without speculation has sampled, (samples,) int64, from the last stage to the first."""
        if self._stage.count > 1 and not self._num_drafts:
            self._stage.send_tokens(token_ids[:, None], 0)

    def shared(self, execute: Execute) -> Execute:
        """Return what executes a step with speculation; in the last stage it also sends the tokens to all others."""
        if self._stage.count == 1 or not self._stage.is_last:
            return execute
        return lambda plan, drafts: self._share(execute(plan, drafts))

    def _share(self, pending: PendingResult) -> PendingResult:
        result = pending()
        if len(result.counts):
            tokens = np.full((len(result.counts), 1 + self._num_drafts), _NO_TOKEN, np.int64)
            for row, token_ids in zip(tokens, result.tokens(), strict=True):
                row[: len(token_ids)] = token_ids
            sent = torch.from_numpy(tokens).to(self._next_tokens.device)
            for stage in range(self._stage.count - 1):
                self._stage.send_tokens(sent, stage)
        return lambda: result

    def result_of(self, plan: StepPlan) -> PendingResult:
        """Return a step's result in a stage that has sent it on: no tokens, or with drafts those of the last stage."""
        rows, tokens = plan.sampled_rows.tolist(), np.empty((0, 1), np.int64)
        if rows and self._num_drafts:
            arrived = self._stage.receive_tokens((len(rows), 1 + self._num_drafts))()
            tokens = arrived.cpu().numpy()
            last = [
                (row, given[given != _NO_TOKEN][-1]) for row, given in zip(rows, tokens, strict=True) if given[0] >= 0
            ]
            self._set([row for row, _ in last], torch.tensor([token for _, token in last], dtype=torch.int64))
        elif rows and self._stage.is_first:
            self._expected.append(_Expected(rows, self._stage.receive_tokens((len(rows), 1))))
        counts = (tokens != _NO_TOKEN).sum(axis=1).astype(np.int32)
        result = StepResult(plan.step_id, tokens.astype(np.int32), counts)
        return lambda: result

    def _set(self, rows: list[int], tokens: Tensor) -> None:
        device = self._next_tokens.device
        self._next_tokens.index_copy_(0, torch.tensor(rows, dtype=torch.int64, device=device), tokens.to(device))
