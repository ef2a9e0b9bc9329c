"""What a runner does for speculation: drafts for each step, and how many pay.

Which of them are accepted is decided in verify.py. The stages of a pipeline before the last one take the
drafts that it has made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter, thread_time

import numpy as np
import torch

from pagestream_engine.config import EngineConfig
from pagestream_engine.features.grammar.sampling import ConstrainedSampling
from pagestream_engine.features.speculation.draft_model import DraftLengths, DraftModel, LoadedDraft, StepCost
from pagestream_engine.features.speculation.drafts import (
    NO_TOKEN,
    Drafts,
    NoProposer,
    Proposer,
    RowCount,
    has_room,
    with_drafts,
)
from pagestream_engine.features.speculation.ngram import NgramProposer
from pagestream_engine.parallel.ranks import Ranks
from pagestream_engine.parallel.stages import Stage
from pagestream_engine.plan import Int32Array, PendingResult, StepPlan, StepResult
from pagestream_engine.runner.batch import PersistentBatch

Execute = Callable[[StepPlan, Drafts | None], PendingResult]
CorrectDrafts = Callable[[StepPlan, Sequence[Sequence[int]]], None]

_ALL_ROWS = 0


class Speculation:
    """Makes drafts for the decodes of a plan, and learns from what became of them.

    Where a row's grammar leaves one text for its next tokens, these are its drafts. Of other drafts the row computes
    those up to the first that its grammar forbids.

    Args:
        grammars: returns the state of the rows, with their grammars.
        num_speculative_tokens: most drafts of a row in a step.
        agree: returns one number for all ranks, which measure different times and must have the same drafts.
        clock: in seconds, by which drafts have to pay.
        publish: takes the drafts of each step that has room for some, as in `Drafts`, also where there are none; None:
            no other stage waits for them.
    """

    def __init__(
        self,
        proposer: Proposer,
        grammars: Callable[[], ConstrainedSampling],
        max_num_seqs: int,
        num_speculative_tokens: int,
        agree: Callable[[float], float],
        *,
        clock: Callable[[], float],
        publish: Callable[[Int32Array], None] | None = None,
    ) -> None:
        self._agree = agree
        self._clock = clock
        self._publish = publish
        self._most = num_speculative_tokens
        self._most_rows = max(max_num_seqs, 1 + self._most)
        """Of logits in a step."""
        self._cost = StepCost()
        self._lengths = DraftLengths(max_num_seqs, self._most, self._cost)
        self._forced_lengths = DraftLengths(1, self._most, self._cost, are_made=False)
        """Of all rows together: how a text becomes tokens is the model's habit more than a request's."""
        self._proposer = proposer
        self._grammars = grammars
        self._forced_rows: set[int] = set()
        """Those whose drafts in this step follow from their grammars."""
        self._had_proposed = False
        """Whether the step before had drafts of the proposer's."""

    def run(self, plan: StepPlan, execute: Execute, correct_drafts: CorrectDrafts) -> PendingResult:
        """Run a step with drafts to its end: the next ones depend on its tokens.

        Args:
            plan: the next one, with room for drafts; the batch has been edited by it.
            execute: computes and samples a plan with its drafts, if there are any.
            correct_drafts: takes the tokens of a plan with drafts.
        """
        started = self._clock()
        plan, drafts = self.propose(plan)
        proposed = self._clock()
        result = execute(plan, drafts)()
        if drafts is not None:
            correct_drafts(plan, result.tokens())
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
        drafts = self._drafts(chunks, rows[first:], counts[first:], self._most_rows - len(plan.sampled_rows))
        if not has_room(plan):
            return plan, None
        token_ids = np.full((len(rows) - first, self._most), NO_TOKEN, np.int32)
        for index, given in drafts.items():
            token_ids[index, : len(given)] = given
        if self._publish is not None:
            self._publish(token_ids)
        return with_drafts(plan, token_ids)

    def _drafts(
        self, chunks: Sequence[RowCount], rows: Sequence[int], counts: Sequence[int], room: int
    ) -> dict[int, Sequence[int]]:
        """Return the drafts of decodes, by their index.

        Args:
            chunks: what the step computes of prompts.
            counts: most tokens that each computes.
            room: most drafts of all.
        """
        drafts: dict[int, Sequence[int]] = {}
        wanted: dict[int, RowCount] = {}
        grammars = self._grammars() if self._grammars().matchers else None
        most_forced = 0 if grammars is None else self._forced_lengths.wanted(_ALL_ROWS)
        all_forced = grammars.forced(rows) if grammars is not None and most_forced else {}
        self._forced_rows.clear()
        for index, (row, count) in enumerate(zip(rows, counts, strict=True)):
            most = min(count - 1, room)
            if most <= 0:
                continue
            forced = all_forced.get(row, ())[: min(most, most_forced)]
            if forced:
                drafts[index] = forced
                self._forced_rows.add(row)
                room -= len(forced)
            elif (num_drafts := min(self._lengths.wanted(row), most)) > 0:
                wanted[index] = RowCount(row, num_drafts)
                room -= num_drafts
        if chunks or wanted:
            proposed = self._proposer.propose(chunks, [*wanted.values()])
            by_row = {row: given for (row, _), given in zip(wanted.values(), proposed, strict=True)}
            allowed = by_row if grammars is None else grammars.allowed(by_row)
            drafts |= {index: allowed[row] for index, (row, _) in wanted.items()}
        return drafts

    def note(
        self, plan: StepPlan, drafts: Drafts | None, result: StepResult, draft_seconds: float, seconds: float
    ) -> None:
        """Take the tokens of a step, and the time that it took.

        Args:
            plan: as `propose` returned it.
            draft_seconds: of `propose`.
            seconds: from there to the result.
        """
        tokens = result.tokens()
        for row, token_ids in zip(plan.sampled_rows.tolist(), tokens, strict=True):
            self._proposer.extend(row, token_ids)
        num_decodes = len(plan.rows) - plan.num_prefills
        num_proposed, had_proposed = 0, self._had_proposed
        if drafts is not None:
            rows, counts = plan.rows[plan.num_prefills :].tolist(), drafts.counts.tolist()
            for row, count, token_ids in zip(rows, counts, tokens[-num_decodes:], strict=True):
                num_accepted = max(0, len(token_ids) - 1)
                if row in self._forced_rows:
                    self._forced_lengths.note(_ALL_ROWS, count, num_accepted)
                else:
                    self._lengths.note(row, count, num_accepted)
                    num_proposed += count
        self._had_proposed = num_proposed > 0
        if not had_proposed:
            num_proposed = 0  # A draft model has computed more for them than it has to for the next ones.
        if not plan.num_prefills and num_decodes:
            num_tokens, seconds, draft_seconds = sum(map(len, tokens)), self._agree(seconds), self._agree(draft_seconds)
            self._cost.note(plan.num_tokens, num_tokens, seconds, num_proposed, draft_seconds)


def make_speculation(
    config: EngineConfig,
    draft: LoadedDraft | None,
    batch: PersistentBatch,
    sampling: Callable[[], ConstrainedSampling],
    *,
    ranks: Ranks,
    stage: Stage,
) -> Speculation | FollowedSpeculation | None:
    """Return None where the settings name no method.

    Args:
        draft: the model of `speculative_model`, if there is one and this is the last stage.
        sampling: returns the state of the runner's rows.
        ranks: of the stage, which have the same drafts: those of its first rank.
        stage: of this process. The last one makes the drafts of all.
    """
    settings, max_num_seqs = config.speculation, config.scheduler.max_num_seqs
    if settings.method is None:
        return None
    if not stage.is_last:
        return FollowedSpeculation(stage, settings.most_drafts)

    def agree(token_ids: Sequence[int]) -> list[int]:
        return [int(each) for each in ranks.first_of_stage(token_ids)]

    def publish(drafts: Int32Array) -> None:
        sent = torch.from_numpy(drafts).to(batch.device, torch.int64)
        for other in range(stage.count - 1):
            stage.send_tokens(sent, other)

    proposer: Proposer
    if draft is not None:
        proposer = DraftModel(draft, batch, max_num_seqs, lambda *given: sampling().guess(*given), agree)
    elif settings.method == "ngram":
        proposer = NgramProposer(max_num_seqs, settings.prompt_lookup_min, settings.prompt_lookup_max)
    else:
        proposer = NoProposer()
    return Speculation(
        proposer,
        sampling,
        max_num_seqs,
        settings.most_drafts,
        lambda number: ranks.first_of_stage([number])[0],
        # A CPU computes on this thread, among others: its own time is not that of other programs. Nor is it that of
        # other stages, for which it waits.
        clock=thread_time if batch.device.type == "cpu" and stage.count == 1 else perf_counter,
        publish=publish if stage.count > 1 else None,
    )


class FollowedSpeculation:
    """In place of `Speculation`, in a stage that does not sample: rows' parameters, grammars and a draft model are in
    the last stage alone.

    Args:
        num_speculative_tokens: most drafts of a row in a step.
    """

    def __init__(self, stage: Stage, num_speculative_tokens: int) -> None:
        self._stage = stage
        self._most = num_speculative_tokens

    def run(self, plan: StepPlan, execute: Execute, correct_drafts: CorrectDrafts) -> PendingResult:
        """Do as `Speculation.run`, with the drafts that the last stage has made for this step."""
        drafts: Drafts | None = None
        if has_room(plan):
            plan, drafts = with_drafts(plan, self._receive(len(plan.rows) - plan.num_prefills))
        result = execute(plan, drafts)()
        if len(result.counts):
            correct_drafts(plan, result.tokens())
        return lambda: result

    def _receive(self, num_decodes: int) -> Int32Array:
        drafts: Int32Array = self._stage.receive_tokens((num_decodes, self._most))().cpu().numpy().astype(np.int32)
        return drafts
