"""Options of the engine, under the names of `pagestream-engine`'s flags."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from pagestream_operator.api.base import ApiModel, Rule

_PART = "[A-Za-z_][A-Za-z0-9_]*"
ModuleName = Annotated[str, Field(max_length=200, pattern=rf"^{_PART}(\.{_PART})*$")]
"""Name of a Python module."""


class EngineOptions(ApiModel):
    """Options of the engine. Each is the flag of `pagestream-engine` of that name; an unset one keeps the engine's
    default. A change replaces the pods, one by one."""

    dtype: Literal["auto", "float32", "float16", "bfloat16"] | None = None
    """Data type of weights, activations and KV cache. auto, the default, is the checkpoint's own."""
    max_model_len: Annotated[int, Field(ge=2, le=16_777_216)] | None = None
    """Most tokens of prompt and output together. Default: the model's context, or what the KV pool holds where that is
    less. Given, all engines take the same requests; one whose KV pool holds fewer tokens does not start."""
    device: Literal["auto", "cpu", "cuda"] | None = None
    """Where the model runs. auto, the default, is the GPU where there is one."""
    enforce_eager: bool | None = None
    """Whether a GPU gets each kernel of a decode by a launch of its own. Default false: decodes are recorded as CUDA
    graphs at the start, which takes seconds and memory there, and saves time in each step. A CPU has none."""
    attention_backend: Literal["auto", "torch", "triton"] | None = None
    """What computes attention. auto, the default, is Triton on a GPU; on a CPU it is C++ kernels that are compiled at
    start, or torch where they can't be used (no compiler, or a head size that is no multiple of 16). triton
    needs a GPU; torch runs on both."""
    deterministic: bool | None = None
    """Whether logits are the same bit for bit whatever else is in the batch. Default: on a CPU where that is
    free, which it is not in bfloat16 on a CPU with AMX, else false. On a GPU its cost has not been measured."""
    quantization: Literal["int8"] | None = None
    """int8 rounds the weights of linears to 8 bits while they are loaded. Default: as the checkpoint has them."""
    shared_weights_gb: Annotated[float, Field(ge=0, le=1_048_576)] | None = None
    """GiB below `$XDG_CACHE_HOME/pagestream/weights` for weights as a CPU's deterministic linears take them, which the
    engines of a machine map. For a volume of the node that `template` mounts there. Default 0: in the pod's memory."""
    cpu_offload_gb: Annotated[float, Field(ge=0, le=65_536)] | None = None
    """GiB of host memory, at most, for weights of a GPU's model: layers' weights stay there and are copied to the GPU
    for their turn in each step, which makes steps longer. Part of the pod's memory. A CPU refuses it. Default 0."""
    seed: Annotated[int, Field(ge=0, le=2**53)] | None = None
    """Seed of the generator that draws seeds for requests without one. Default 0."""
    max_logprobs: Annotated[int, Field(ge=-1, le=1_000_000)] | None = None
    """Most log probabilities that a request may ask for at each token; -1 is no limit. Default 20."""
    block_size: Literal[1, 2, 4, 8, 16, 32, 64, 128] | None = None
    """Tokens in a KV block. Default 64 with the Triton kernels, else 16. A GPU needs 8 or more."""
    num_gpu_blocks_override: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    """KV blocks in the pool, on a GPU or a CPU. Default: as many as fit, by measurement."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] | None = None
    """Share of the GPU's memory for weights, activations and the KV pool. Default 0.9."""
    enable_prefix_caching: bool | None = None
    """Whether blocks of prompts that begin alike are shared. Default true."""
    eviction_policy: Literal["lru", "slru", "lfu", "cost"] | None = None
    """KV cache eviction policy. It evicts the least recently used block, of those never found again first (slru, the
    default) or of all (lru), the least often used one (lfu), or the one that is cheapest to compute again (cost)."""
    kv_cache_dtype: Literal["auto", "bfloat16", "fp8", "fp8_e4m3"] | None = None
    """What keys and values are kept as: auto (the default) is the model's dtype; fp8, or fp8_e4m3, takes half of the
    memory of 16 bits, gives other tokens, and is not deterministic."""
    swap_space: Annotated[float, Field(ge=0, le=65_536)] | None = None
    """GiB of host memory for KV blocks that the pool evicts, those of preempted sequences too; they are copied back
    when they are needed again. Part of the pod's memory. Default 0: such blocks are computed again."""
    max_num_seqs: Annotated[int, Field(ge=1, le=65_536)] | None = None
    """Most sequences that run at once. Default 256."""
    max_num_batched_tokens: Annotated[int, Field(ge=1, le=16_777_216)] | None = None
    """Most tokens of a step, which bounds its time and memory. Default 2048."""
    itl_bound_ms: Annotated[float, Field(gt=0, le=3_600_000)] | None = None
    """Milliseconds that a step with prompts may take while sequences decode: chunks of prompts get smaller so that it
    does, by measured times. Default: no bound."""
    mask_wait_ms: Annotated[float, Field(gt=0, le=3_600_000)] | None = None
    """Most milliseconds that a step waits for the masks of structured outputs; a request whose mask comes later gets
    its token in a later step. Default 20."""
    scheduling_policy: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    """Order in which waiting requests are admitted: fcfs (the default, first come first served), priority (by class;
    the first class interrupts lower ones), shortest_first, round_robin, fair (equal tokens for all tenants), or one
    that `plugins` register."""
    speculative_method: Literal["ngram", "draft_model", "grammar"] | None = None
    """Speculative decoding method: where drafts come from; the tokens stay the same. ngram: what
    followed where a request's last tokens stood before. draft_model: what `speculativeModel` gives. grammar: what a
    request's grammar leaves as the only text, as with the other methods too. Default: draft_model where there is one,
    else no drafts."""
    speculative_model: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    """A smaller model of the same vocabulary: a folder that the pods have, or the name of a Hugging Face repository. It
    takes part of the memory of weights and KV pool."""
    num_speculative_tokens: Annotated[int, Field(ge=1, le=15)] | None = None
    """Most drafts of a sequence in a step. It gets as many as have paid so far, or none. Default 5."""
    prompt_lookup_min: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Fewest last tokens that must have stood before, for ngram. Default 2."""
    prompt_lookup_max: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Most last tokens that are compared, for ngram; at least `promptLookupMin`. Default 5."""
    plugins: Annotated[list[ModuleName], Field(max_length=32)] | None = None
    """Modules that register scheduling policies and model families, imported first. They are in the image, or in a
    volume that `PYTHONPATH` in `template.env` names."""
    enable_lora: bool | None = None
    """Whether requests may name LoRA adapters. Default false."""
    max_loras: Annotated[int, Field(ge=1, le=256)] | None = None
    """Adapters that run at once; a request with another one waits. Default 32."""
    max_lora_rank: Annotated[int, Field(ge=1, le=512)] | None = None
    """Largest rank of an adapter. Default 256."""
    max_cpu_loras: Annotated[int, Field(ge=1, le=65_536)] | None = None
    """Adapters that stay in host memory, at least `maxLoras`; others are read again when a request comes. Part of the
    pod's memory. Default 64."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "!has(self.maxNumSeqs) || !has(self.maxNumBatchedTokens) || self.maxNumBatchedTokens >= self.maxNumSeqs",
            "engine.maxNumBatchedTokens is at least engine.maxNumSeqs, since every running sequence takes a token of "
            "each step: raise it, or lower maxNumSeqs",
            ".maxNumBatchedTokens",
        ),
        Rule(
            "!has(self.schedulingPolicy) || has(self.plugins) || "
            "self.schedulingPolicy in ['fcfs', 'priority', 'shortest_first', 'round_robin', 'fair']",
            "engine.schedulingPolicy is fcfs, priority, shortest_first, round_robin, fair, or a policy that a plugin "
            "registers: name its module in engine.plugins",
            ".schedulingPolicy",
        ),
        Rule(
            "!has(self.deterministic) || !self.deterministic || !has(self.kvCacheDtype) || "
            "!(self.kvCacheDtype in ['fp8', 'fp8_e4m3'])",
            "engine.kvCacheDtype is auto or bfloat16 with engine.deterministic: in fp8 a key is rounded to a scale "
            "that later tokens may raise",
            ".kvCacheDtype",
        ),
    )

    def to_environment(self) -> Mapping[str, str]:
        """`PAGESTREAM_ENGINE__<OPTION>` for each option that is set."""
        given = self.model_dump(exclude_none=True)
        return {f"PAGESTREAM_ENGINE__{name.upper()}": _text(value) for name, value in sorted(given.items())}


def _text(value: object) -> str:
    if isinstance(value, list):
        return ",".join(value)
    return str(value).lower() if isinstance(value, bool) else str(value)
