"""What a step computes, as far as its time depends on it."""

from __future__ import annotations

from typing import NamedTuple, Self

from pagestream_engine.plan import ScheduledStep

from pagestream_simulator.fleet.profile import StepCost


class StepContents(NamedTuple):
    """The contents that `StepCost` has costs for, in the order of its fields, without the step itself."""

    prefill_tokens: int
    prefill_pairs: int
    """Pairs of a chunk's token and a token that it attends to."""
    decodes: int
    decode_context: int
    """Tokens that decoding sequences attend to."""

    @classmethod
    def of(cls, step: ScheduledStep) -> Self:
        """Return the contents of a step that is scheduled and not sent."""
        tokens = pairs = 0
        for chunk in step.prefills:
            new = chunk.num_scheduled_tokens
            tokens += new
            pairs += new * chunk.seq.num_sent_tokens + new * (new + 1) // 2
        # `num_sent_tokens` is inlined: this runs for every decode in every step.
        context = sum([e.seq.num_computed_tokens + e.seq.num_in_flight_tokens for e in step.decodes])
        return cls(tokens, pairs, len(step.decodes), context + len(step.decodes))

    def seconds(self, cost: StepCost) -> float:
        """Return what a step of these contents takes."""
        return (
            cost.fixed_s
            + self.prefill_tokens * cost.prefill_token_s
            + self.prefill_pairs * cost.prefill_pair_s
            + self.decodes * cost.decode_s
            + self.decode_context * cost.decode_context_s
        )
