"""Plans of steps that a test writes down, in which every token is given and none comes from an earlier step."""

from __future__ import annotations

from dataclasses import replace

from pagestream_engine.cache import full_attention
from pagestream_engine.scheduler import ScheduledStep
from pagestream_engine.step import PlanBuilder, StepPlan

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
