"""Plans of steps that a test writes down, in which every token is given and none comes from an earlier step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from pagestream_engine import SamplingParams
from pagestream_engine.plan import BlockEdits, KVLayout, NewSequence, ScheduledStep, StepPlan, full_attention
from pagestream_engine.steps import PlanBuilder

MAX_ROWS = 64
NO_ROW = -1  # of a sequence that no plan has sent yet
LAYOUT = full_attention(16)


def given_plan(step: ScheduledStep) -> StepPlan:
    """Return a plan that resets the runner, and sends each sequence with its tokens up to the end of its part."""
    scheduled = (*step.prefills, *step.decodes)
    for entry in scheduled:
        entry.seq.row = NO_ROW
    plan = PlanBuilder(MAX_ROWS, LAYOUT).build(step)
    ends = {entry.seq.row: entry.seq.num_computed_tokens + entry.num_scheduled_tokens for entry in scheduled}
    added = [replace(new, token_ids=new.token_ids[: ends.get(new.row, len(new.token_ids))]) for new in plan.added]
    return replace(plan, added=tuple(added))


def decodes(count: int, num_computed: int, layout: KVLayout) -> StepPlan:
    """Return a plan that resets the runner, and computes a token of each of so many sequences in block 0."""
    rows, none = np.arange(count, dtype=np.int32), np.empty(0, np.int32)
    added = tuple(
        NewSequence(
            row=row,
            token_ids=np.zeros(num_computed + 1, np.int32),
            num_prompt_tokens=1,
            num_computed_tokens=num_computed,
            params=SamplingParams(temperature=0.0),
            seed=0,
            end_token_ids=(),
            block_tables=tuple(np.zeros(group.num_blocks_for(num_computed + 1), np.int32) for group in layout.groups),
        )
        for row in range(count)
    )
    return StepPlan(
        step_id=0,
        reset=True,
        removed=none,
        added=added,
        appended=tuple(BlockEdits(none, none, none) for _ in layout.groups),
        copies=none.reshape(0, 2),
        rows=rows,
        num_new_tokens=np.ones(count, np.int32),
        num_prefills=0,
        sampled_rows=rows,
        sampled_from=rows,
    )
