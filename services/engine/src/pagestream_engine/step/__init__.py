"""The records between the core and the executor."""

from pagestream_engine.step.logprobs import logprob_rows
from pagestream_engine.step.pending import PendingResult
from pagestream_engine.step.plan_builder import PlanBuilder
from pagestream_engine.step.records import BlockEdits, NewSequence, StepLogprobs, StepPlan, StepResult

__all__ = [
    "BlockEdits",
    "NewSequence",
    "PendingResult",
    "PlanBuilder",
    "StepLogprobs",
    "StepPlan",
    "StepResult",
    "logprob_rows",
]
