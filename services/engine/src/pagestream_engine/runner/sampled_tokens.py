"""Bring the tokens that the last stage of a pipeline samples to the stages that go on from them."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pagestream_engine.features.speculation.speculation import Execute
from pagestream_engine.parallel.stages import Arriving, Stage
from pagestream_engine.plan import PendingResult, StepPlan, StepResult
from pagestream_engine.runner.batch import PersistentBatch
from pagestream_engine.sampler import Sampled

_NO_TOKEN = -1


class _Expected(NamedTuple):
    """Tokens of a step that the last stage may not have sampled yet."""

    rows: list[int]
    tokens: Arriving
    may_lack: bool
    """Whether some row may get none, and computes its last token again."""


class SampledTokens:
    """What a step samples, in every stage that needs it, where there are several.

    Without drafts that is the first one: it goes on with the next step, and waits for a row's token only before a step
    that decodes it. Where a row has a grammar it is every stage, since that row may get no token. With drafts every
    stage counts by them how many tokens its rows have, and so waits for those of each step at its end.

    Args:
        batch: of this stage; it gets the token that each row's next decode computes.
        num_drafts: most drafts of a row in a step; 0 without speculation.
    """

    def __init__(self, stage: Stage, batch: PersistentBatch, num_drafts: int) -> None:
        self._stage = stage
        self._batch = batch
        self._num_drafts = num_drafts
        self._expected: deque[_Expected] = deque()
        self._with_grammar: set[int] = set()
        """Rows that have one."""

    def receive(self, plan: StepPlan) -> None:
        """Wait for the tokens of all rows that a plan decodes, adds or removes, before the batch is edited by it."""
        self._receive(plan)
        if plan.reset:
            self._with_grammar.clear()
        self._with_grammar.difference_update(plan.removed.tolist())
        for new in plan.added:
            if new.params.structured_outputs is not None:
                self._with_grammar.add(new.row)

    def _receive(self, plan: StepPlan) -> None:
        wanted = {*plan.rows[plan.num_prefills :].tolist(), *plan.removed.tolist(), *(new.row for new in plan.added)}
        numbers = [number for number, each in enumerate(self._expected, 1) if plan.reset or wanted & set(each.rows)]
        for _ in range(max(numbers, default=0)):
            expected = self._expected.popleft()
            rows, tokens = expected.rows, expected.tokens()[:, 0]
            if expected.may_lack:
                tokens = tokens.cpu()
                has_token = (tokens != _NO_TOKEN).tolist()
                self._batch.take_back([row for row, has in zip(rows, has_token, strict=True) if not has])
                rows = [row for row, has in zip(rows, has_token, strict=True) if has]
                tokens = tokens[tokens != _NO_TOKEN]
            self._set(rows, tokens)

    def give(self, plan: StepPlan, sampled: Sampled) -> None:
        """Send what a step without speculation has sampled from the last stage to those that need it."""
        if self._num_drafts:
            return
        token_ids = sampled.token_ids
        if sampled.left_out:
            token_ids = token_ids.clone()
            token_ids[list(sampled.left_out)] = _NO_TOKEN
        for stage in range(self._stage.count - 1 if self._may_lack(plan) else 1):
            self._stage.send_tokens(token_ids[:, None], stage)

    def _may_lack(self, plan: StepPlan) -> bool:
        return not self._with_grammar.isdisjoint(plan.sampled_rows.tolist())

    def shared(self, execute: Execute) -> Execute:
        """Return what executes a step with speculation; in the last stage it also sends the tokens to all others."""
        if not self._stage.is_last:
            return execute
        return lambda plan, drafts: self._share(execute(plan, drafts))

    def _share(self, pending: PendingResult) -> PendingResult:
        result = pending()
        if len(result.counts):
            tokens = np.full((len(result.counts), 1 + self._num_drafts), _NO_TOKEN, np.int64)
            for row, token_ids in zip(tokens, result.tokens(), strict=True):
                row[: len(token_ids)] = token_ids
            sent = torch.from_numpy(tokens).to(self._batch.device)
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
        elif rows and (self._stage.is_first or self._may_lack(plan)):
            tokens_of = self._stage.receive_tokens((len(rows), 1))
            self._expected.append(_Expected(rows, tokens_of, self._may_lack(plan)))
        counts = (tokens != _NO_TOKEN).sum(axis=1).astype(np.int32)
        result = StepResult(plan.step_id, tokens.astype(np.int32), counts)
        return lambda: result

    def _set(self, rows: list[int], tokens: Tensor) -> None:
        device = self._batch.device
        places = torch.tensor(rows, dtype=torch.int64, device=device)
        self._batch.next_tokens.index_copy_(0, places, tokens.to(device))
