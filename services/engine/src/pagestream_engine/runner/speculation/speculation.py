"""What a runner keeps for speculation: the rows' tokens, and how many drafts pay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from time import perf_counter

import numpy as np

from pagestream_engine.config import SpeculationConfig
from pagestream_engine.runner.speculation.draft_lengths import DraftLengths
from pagestream_engine.runner.speculation.drafts import NO_TOKEN, Drafts
from pagestream_engine.runner.speculation.ngram import NgramProposer
from pagestream_engine.step.pending import PendingResult
from pagestream_engine.step.records import StepPlan, StepResult

Execute = Callable[[StepPlan, Drafts | None], PendingResult]
Settle = Callable[[StepPlan, Sequence[Sequence[int]]], None]


class Speculation:
    """Makes drafts for the decodes of a plan, and learns from what became of them.

    Args:
        config: settings.
        max_num_seqs: rows of the batch.
    """

    def __init__(self, config: SpeculationConfig, max_num_seqs: int) -> None:
        self._most = config.num_speculative_tokens
        self._most_rows = max(max_num_seqs, 1 + self._most)
        """Of logits in a step."""
        self._lengths = DraftLengths(max_num_seqs, self._most)
        self._proposer = NgramProposer(max_num_seqs, config.prompt_lookup_min, config.prompt_lookup_max)

    def run(self, plan: StepPlan, execute: Execute, settle: Settle) -> PendingResult:
        """Run a step with drafts to its end: the next ones depend on its tokens.

        Args:
            plan: the next one, with room for drafts.
            execute: computes and samples a plan with its drafts, if there are any.
            settle: takes the tokens of a plan with drafts.
        """
        started = perf_counter()
        plan, drafts = self.propose(plan)
        result = execute(plan, drafts)()
        if drafts is not None:
            settle(plan, result.tokens())
        self.note(plan, drafts, result, perf_counter() - started)
        return lambda: result

    def propose(self, plan: StepPlan) -> tuple[StepPlan, Drafts | None]:
        """Return the plan with as many tokens as there are drafts, which are at most those that it has room for.

        Args:
            plan: the next one; its new rows are taken.
        """
        for new in plan.added:
            self._proposer.start(new.row, new.token_ids)
            self._lengths.start(new.row)
        first = plan.num_prefills
        counts = plan.num_new_tokens[first:]
        if not len(counts) or counts.max() == 1:
            return plan, None
        token_ids = np.full((len(counts), self._most), NO_TOKEN, np.int32)
        room = self._most_rows - len(plan.sampled_rows)
        num_drafts = np.zeros(len(counts), np.int32)
        for index, (row, count) in enumerate(zip(plan.rows[first:].tolist(), counts.tolist(), strict=True)):
            wanted = min(self._lengths.wanted(row), count - 1, room)
            if wanted > 0:
                drafts = self._proposer.propose(row, wanted)
                token_ids[index, : len(drafts)] = drafts
                num_drafts[index] = len(drafts)
                room -= len(drafts)
        num_new_tokens = plan.num_new_tokens.copy()
        num_new_tokens[first:] = 1 + num_drafts
        narrowed = replace(plan, num_new_tokens=num_new_tokens)
        return narrowed, Drafts(token_ids) if num_drafts.any() else None

    def note(self, plan: StepPlan, drafts: Drafts | None, result: StepResult, seconds: float) -> None:
        """Take the tokens of a step, and the time that it took.

        Args:
            plan: as `propose` returned it.
            drafts: likewise.
            result: the step's.
            seconds: from the plan to its result.
        """
        tokens = result.tokens()
        for row, token_ids in zip(plan.sampled_rows.tolist(), tokens, strict=True):
            self._proposer.extend(row, token_ids)
        num_decodes = len(plan.rows) - plan.num_prefills
        if drafts is not None:
            rows = plan.rows[plan.num_prefills :].tolist()
            for row, count, token_ids in zip(rows, drafts.counts.tolist(), tokens[-num_decodes:], strict=True):
                self._lengths.note(row, count, max(0, len(token_ids) - 1))
        if not plan.num_prefills and num_decodes:
            self._lengths.cost.note(plan.num_tokens, sum(map(len, tokens)), seconds)
