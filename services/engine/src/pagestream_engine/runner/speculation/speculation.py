"""What a runner does for speculation: drafts for each step, and how many of them pay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from pagestream_engine.runner.speculation.draft_lengths import DraftLengths
from pagestream_engine.runner.speculation.drafts import NO_TOKEN, Drafts
from pagestream_engine.runner.speculation.proposer import Proposer, RowCount
from pagestream_engine.step.pending import PendingResult
from pagestream_engine.step.records import StepPlan, StepResult

Execute = Callable[[StepPlan, Drafts | None], PendingResult]
Settle = Callable[[StepPlan, Sequence[Sequence[int]]], None]


class Speculation:
    """Makes drafts for the decodes of a plan, and learns from what became of them.

    Args:
        proposer: of drafts.
        max_num_seqs: rows of the batch.
        num_speculative_tokens: most drafts of a row in a step.
        agree: returns one number for all ranks, which measure different times and must have the same drafts.
        clock: in seconds, by which drafts have to pay.
    """

    def __init__(
        self,
        proposer: Proposer,
        max_num_seqs: int,
        num_speculative_tokens: int,
        agree: Callable[[float], float],
        *,
        clock: Callable[[], float],
    ) -> None:
        self._agree = agree
        self._clock = clock
        self._most = num_speculative_tokens
        self._most_rows = max(max_num_seqs, 1 + self._most)
        """Of logits in a step."""
        self._lengths = DraftLengths(max_num_seqs, self._most)
        self._proposer = proposer
        self._had_drafts = False
        """Whether the step before had any."""

    def run(self, plan: StepPlan, execute: Execute, settle: Settle) -> PendingResult:
        """Run a step with drafts to its end: the next ones depend on its tokens.

        Args:
            plan: the next one, with room for drafts; the batch has been edited by it.
            execute: computes and samples a plan with its drafts, if there are any.
            settle: takes the tokens of a plan with drafts.
        """
        started = self._clock()
        plan, drafts = self.propose(plan)
        proposed = self._clock()
        result = execute(plan, drafts)()
        if drafts is not None:
            settle(plan, result.tokens())
        self.note(plan, drafts, result, proposed - started, self._clock() - proposed)
        return lambda: result

    def propose(self, plan: StepPlan) -> tuple[StepPlan, Drafts | None]:
        """Return the plan with as many tokens as there are drafts, which are at most those that it has room for.

        Args:
            plan: the next one; its new rows are taken.
        """
        for new in plan.added:
            self._proposer.start(new)
            self._lengths.start(new.row)
        first = plan.num_prefills
        rows, counts = plan.rows.tolist(), plan.num_new_tokens.tolist()
        chunks = [RowCount(row, count) for row, count in zip(rows[:first], counts[:first], strict=True)]
        wanted, indices = self._wanted(rows[first:], counts[first:], self._most_rows - len(plan.sampled_rows))
        drafts = self._proposer.propose(chunks, wanted) if chunks or wanted else ()
        if max(counts[first:], default=1) == 1:
            return plan, None
        num_new_tokens = plan.num_new_tokens.copy()
        num_new_tokens[first:] = 1
        token_ids = np.full((len(rows) - first, self._most), NO_TOKEN, np.int32)
        for index, given in zip(indices, drafts, strict=True):
            token_ids[index, : len(given)] = given
            num_new_tokens[first + index] += len(given)
        return replace(plan, num_new_tokens=num_new_tokens), Drafts(token_ids) if any(drafts) else None

    def _wanted(self, rows: Sequence[int], counts: Sequence[int], room: int) -> tuple[list[RowCount], list[int]]:
        """Return how many drafts decodes should have, and the index of each such decode.

        Args:
            rows: of the decodes.
            counts: most tokens that each computes.
            room: most drafts of all.
        """
        wanted, indices = [], []
        for index, (row, count) in enumerate(zip(rows, counts, strict=True)):
            if count > 1:
                num_drafts = min(self._lengths.wanted(row), count - 1, room)
                if num_drafts > 0:
                    wanted.append(RowCount(row, num_drafts))
                    indices.append(index)
                    room -= num_drafts
        return wanted, indices

    def note(
        self, plan: StepPlan, drafts: Drafts | None, result: StepResult, draft_seconds: float, seconds: float
    ) -> None:
        """Take the tokens of a step, and the time that it took.

        Args:
            plan: as `propose` returned it.
            drafts: likewise.
            result: the step's.
            draft_seconds: of `propose`.
            seconds: from there to the result.
        """
        tokens = result.tokens()
        for row, token_ids in zip(plan.sampled_rows.tolist(), tokens, strict=True):
            self._proposer.extend(row, token_ids)
        num_decodes = len(plan.rows) - plan.num_prefills
        num_drafts, had_drafts = 0, self._had_drafts
        self._had_drafts = drafts is not None
        if drafts is not None:
            rows, counts = plan.rows[plan.num_prefills :].tolist(), drafts.counts.tolist()
            num_drafts = sum(counts)
            for row, count, token_ids in zip(rows, counts, tokens[-num_decodes:], strict=True):
                self._lengths.note(row, count, max(0, len(token_ids) - 1))
        if not had_drafts:
            num_drafts = 0  # A draft model has computed more for them than it has to for the next ones.
        if not plan.num_prefills and num_decodes:
            num_tokens, seconds, draft_seconds = sum(map(len, tokens)), self._agree(seconds), self._agree(draft_seconds)
            self._lengths.cost.note(plan.num_tokens, num_tokens, seconds, num_drafts, draft_seconds)
