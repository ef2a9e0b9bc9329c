"""Keywords of the engine, for type checkers and editors. Written by `python tools/write_options.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict


class EngineOptions(TypedDict, total=False):
    """The flat option names, which are vLLM's; see the groups of `engine.py` for their meaning."""

    dtype: str
    max_model_len: int | None
    device: str
    enforce_eager: bool
    attention_backend: str
    deterministic: bool | None
    quantization: str | None
    shared_weights_gb: float
    cpu_offload_gb: float
    seed: int
    max_logprobs: int
    block_size: int | None
    num_gpu_blocks_override: int | None
    gpu_memory_utilization: float
    enable_prefix_caching: bool
    eviction_policy: str
    kv_cache_dtype: str
    swap_space: float
    max_num_seqs: int
    max_num_batched_tokens: int
    itl_bound_ms: float | None
    prefill_spread_steps: int
    mask_wait_ms: float
    scheduling_policy: str
    speculative_method: str | None
    speculative_model: str | None
    num_speculative_tokens: int
    prompt_lookup_min: int
    prompt_lookup_max: int
    executor: str
    async_scheduling: bool | None
    tensor_parallel_size: int
    pipeline_parallel_size: int
    nnodes: int
    node_rank: int
    master_addr: str
    master_port: int
    node_secret_file: str | None
    node_group: str
    node_join_timeout_s: float
    plugins: Sequence[str]
    enable_lora: bool
    max_loras: int
    max_lora_rank: int
    max_cpu_loras: int
