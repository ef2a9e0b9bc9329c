"""The ids of a scheduled step: all that a worker reads of the scheduler's own objects.

Beams and choices that the request does not ask for by an id of their own count as one that it does ask for.
"""

from collections.abc import Mapping

from pagestream_engine.plan import ScheduledStep
from pagestream_engine.request import sibling_id


def prefill_remaining(step: ScheduledStep) -> Mapping[str, int]:
    """Return, for each sequence with prompt tokens in the step, the tokens that it needs computed after it."""
    remaining = {sibling_id(sibling.seq_id): 0 for chunk in step.prefills for sibling in chunk.siblings}
    for chunk in step.prefills:
        seq = chunk.seq
        remaining[sibling_id(seq.seq_id)] = seq.num_unsent_tokens - chunk.num_scheduled_tokens
    return remaining


def decoding(step: ScheduledStep) -> set[str]:
    """Return the sequences that the step only decodes."""
    return {sibling_id(entry.seq.seq_id) for entry in step.decodes}
