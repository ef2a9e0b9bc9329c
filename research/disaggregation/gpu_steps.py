"""Step times of GPUs: derived from a data sheet, or fitted to published measurements."""

from __future__ import annotations

from dataclasses import dataclass

from pagestream_simulator.virtual_engine import StepContents


@dataclass(frozen=True, slots=True)
class Chip:
    """What a data sheet says."""

    flops: float
    """Dense bfloat16 products and sums a second."""
    memory_bytes_per_s: float
    memory_bytes: float
    link_bytes_per_s: float
    """Of its network card, each way."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder in bfloat16, as far as its steps' times depend on it."""

    parameters: float
    """Of matrices that each token is multiplied with."""
    layers: int
    attention_width: int
    """Query heads times their size."""
    kv_token_bytes: int
    """Keys and values of a token, in all layers."""


@dataclass(frozen=True, slots=True)
class Roofline:
    """Derived, not measured: peaks of the data sheet, no launch costs."""

    chip: Chip
    model: ModelShape

    def seconds(self, step: StepContents) -> float:
        """Return what a step takes: weights and the decodes' keys and values are read while products are computed."""
        tokens = step.prefill_tokens + step.decodes
        if not tokens:
            return 0.0
        pair_flops = 4.0 * self.model.attention_width * self.model.layers
        flops = 2.0 * self.model.parameters * tokens + pair_flops * (step.prefill_pairs + step.decode_context)
        num_bytes = 2.0 * self.model.parameters + self.model.kv_token_bytes * step.decode_context
        return max(flops / self.chip.flops, num_bytes / self.chip.memory_bytes_per_s)


H100_SXM = Chip(flops=989.4e12, memory_bytes_per_s=3.35e12, memory_bytes=80e9, link_bytes_per_s=50e9)
"""NVIDIA H100 Tensor Core GPU data sheet, SXM5: 1,979 TFLOPS of bfloat16 with sparsity, half of it without; 3.35 TB/s,
80 GB. NVIDIA DGX H100 data sheet: a ConnectX-7 of 400 Gb/s for each GPU."""

LLAMA_3_1_8B = ModelShape(parameters=7.5e9, layers=32, attention_width=4096, kv_token_bytes=131_072)
"""Of 8.03e9 parameters 0.53e9 are the table of embeddings, which is looked up. 8 heads of 128 for keys and values."""


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
