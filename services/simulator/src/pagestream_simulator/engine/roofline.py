"""Step times derived from a chip's data sheet and a model's shape: the longer of arithmetic and of memory."""

from __future__ import annotations

from dataclasses import dataclass

from pagestream_simulator.engine.step_contents import StepContents


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
