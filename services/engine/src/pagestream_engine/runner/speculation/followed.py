"""What the stages of a pipeline before the last one do for speculation: they take its drafts."""

from __future__ import annotations

import numpy as np

from pagestream_engine.parallel.stages import Stage
from pagestream_engine.plan import Int32Array, PendingResult, StepPlan
from pagestream_engine.runner.speculation.drafts import Drafts, has_room, with_drafts
from pagestream_engine.runner.speculation.speculation import Execute, Settle


class FollowedSpeculation:
    """In place of `Speculation`, in a stage that does not sample: rows' parameters, grammars and a draft model are in
    the last stage alone.

    Args:
        num_speculative_tokens: most drafts of a row in a step.
    """

    def __init__(self, stage: Stage, num_speculative_tokens: int) -> None:
        self._stage = stage
        self._most = num_speculative_tokens

    def run(self, plan: StepPlan, execute: Execute, settle: Settle) -> PendingResult:
        """Do as `Speculation.run`, with the drafts that the last stage has made for this step."""
        drafts: Drafts | None = None
        if has_room(plan):
            plan, drafts = with_drafts(plan, self._receive(len(plan.rows) - plan.num_prefills))
        result = execute(plan, drafts)()
        if len(result.counts):
            settle(plan, result.tokens())
        return lambda: result

    def _receive(self, num_decodes: int) -> Int32Array:
        drafts: Int32Array = self._stage.receive_tokens((num_decodes, self._most))().cpu().numpy().astype(np.int32)
        return drafts
