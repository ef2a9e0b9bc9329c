"""Step times fitted to published measurements of a GPU."""

from __future__ import annotations

from dataclasses import dataclass

from pagestream_simulator.engine.step_contents import StepContents


@dataclass(frozen=True, slots=True)
class MeasuredSteps:
    """A linear model of steps. One that computes prompts has a least time, since its kernels are launched one by one;
    decodes alone run as a recorded graph."""

    prefill_min_s: float
    """Of a step that computes any prompt token."""
    prefill_token_s: float
    prefill_pair_s: float
    """Per pair of a chunk's token and a token that it attends to."""
    decode_fixed_s: float
    """Of a step that only decodes."""
    decode_context_s: float
    """Per token that a decoding sequence attends to."""

    def seconds(self, step: StepContents) -> float:
        """Return what a step takes."""
        context_s = step.decode_context * self.decode_context_s
        if not step.prefill_tokens:
            return self.decode_fixed_s + context_s if step.decodes else 0.0
        prefill_s = step.prefill_tokens * self.prefill_token_s + step.prefill_pairs * self.prefill_pair_s
        return max(self.prefill_min_s, prefill_s) + context_s


LLAMA_3_1_8B_ON_TWO_A100 = MeasuredSteps(
    prefill_min_s=22.7e-3,
    prefill_token_s=54.2e-6,
    prefill_pair_s=2.78e-9,
    decode_fixed_s=8.51e-3,
    decode_context_s=0.118e-6,
)
"""SageServe (Jaiswal et al., Proc. ACM Meas. Anal. Comput. Syst. 9, 3, 2025), `data/Llama-3.1-8B-tp-2.csv` of its
simulator (MIT licence): Llama 3.1 8B on two A100 of 80 GB, medians of five runs. Prompts of 512 to 8,192 tokens are
met within 11 %; the least of shorter ones is the floor. Decodes of 1 to 32 sequences are met within 4 %, once the time
is taken away in which the other prompts of the batch were computed, two at a time. Decodes behind 8,192 tokens are left
out: beyond that length steps were not recorded as graphs, and took twice as long."""
