"""The engine's settings: frozen groups, composed, each field with its unit and reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from math import inf
from typing import Any, TypedDict

from pagestream_engine.errors import ConfigError, UnsupportedOption
from pagestream_engine.parallel.place import RankPlace

DTYPES = ("auto", "float32", "float16", "bfloat16")
DEVICES = ("auto", "cpu", "cuda")
ATTENTION_BACKENDS = ("auto", "torch", "triton")
EXECUTORS = ("inline", "process")
SPECULATIVE_METHODS = ("ngram", "draft_model", "grammar")
QUANTIZATIONS = ("int8",)
"""Of weights that are quantised while they are loaded."""
MAX_RANKS = 64
"""Of a group."""
_MAX_GROUP_NAME = 253
MAX_SPECULATIVE_TOKENS = 15
"""With the last token, what one pass of attention over a decode takes."""
MAX_LORAS, MAX_LORA_RANK = 256, 512
EVICTION_POLICIES = ("lru", "slru", "lfu", "cost")
KV_CACHE_DTYPES = ("auto", "bfloat16", "fp8", "fp8_e4m3")
SCALED_CACHE_DTYPES = ("fp8", "fp8_e4m3")

DEFAULT_BLOCK_SIZE = 16
TRITON_BLOCK_SIZE = 64
"""Tokens a block where no option names them: a block is a tile of the Triton kernels."""


@dataclass(frozen=True)
class ModelConfig:
    """What is loaded and how it computes."""

    dtype: str = "auto"
    """Of weights and activations, and of the KV cache unless `kv_cache_dtype` says otherwise; auto is the checkpoint's
    own."""
    max_model_len: int | None = None
    """Tokens of prompt and output together; None is what the model and the block pool allow."""
    device: str = "auto"
    """auto is the GPU where there is one."""
    enforce_eager: bool = False
    """Whether a GPU gets each kernel of a decode by a launch of its own. Otherwise decodes are recorded as CUDA graphs
    at the start, for all numbers of sequences up to `max_num_seqs` in steps: seconds and memory at the start, for less
    time on the host in each step. A CPU has none."""
    attention_backend: str = "auto"
    """auto is Triton on a GPU; on a CPU compiled C++, or torch where that is impossible."""
    deterministic: bool | None = None
    """Whether a sequence's logits are the same bit for bit in any batch, after preemption and in any chunks. None: yes
    on a CPU where it is free, which it is not in bfloat16 on a CPU with AMX. On a GPU its cost has not been measured,
    and None is off."""
    quantization: str | None = None
    """int8 rounds the weights of linears to 8 bits while they are loaded, with a scale for each output; activations,
    norms, the embedding, a head that is the embedding, and routers of experts keep the dtype. None: as the checkpoint
    has them."""
    shared_weights_gb: float = 0.0
    """GiB of disk, below `$XDG_CACHE_HOME/pagestream/weights`, for weights in the layout of the CPU's deterministic
    linears: all engines of the machine map the same pages, and start without laying them out anew. 0: each engine has
    its own memory, as it has where its linears are others."""
    cpu_offload_gb: float = 0.0
    """GiB of host memory for weights of a GPU's model, at most: of as many layers as fit, spread evenly. Before a
    layer's turn its weights are copied to one of two buffers, while the layers before it compute; decodes are not
    recorded as CUDA graphs then. 0: all weights are on the GPU."""
    seed: int = 0
    """Of the generator that draws seeds for requests that bring none."""
    max_logprobs: int = 20
    """Most log probabilities that a request may ask for at each token; -1 is no limit."""

    def __post_init__(self) -> None:
        _choice("dtype", self.dtype, DTYPES)
        _choice("device", self.device, DEVICES)
        _choice("attention_backend", self.attention_backend, ATTENTION_BACKENDS)
        if not isinstance(self.enforce_eager, bool):
            raise ConfigError("enforce_eager", self.enforce_eager, "True or False")
        if self.deterministic is not None and not isinstance(self.deterministic, bool):
            raise ConfigError("deterministic", self.deterministic, "True, False or None")
        if self.max_model_len is not None:
            _at_least("max_model_len", self.max_model_len, 2)
        shared = self.shared_weights_gb
        if not (_is_number(shared) and 0.0 <= shared < inf):
            raise ConfigError("shared_weights_gb", shared, "GiB of at least 0")
        if self.quantization is not None:
            _choice("quantization", self.quantization, QUANTIZATIONS)
        if not (_is_number(self.cpu_offload_gb) and 0.0 <= self.cpu_offload_gb < inf):
            raise ConfigError("cpu_offload_gb", self.cpu_offload_gb, "GiB of at least 0")
        if self.cpu_offload_gb and self.quantization is not None:
            hint = "weights of 8 bits have layouts of their own, which stay on the device"
            raise ConfigError("cpu_offload_gb", self.cpu_offload_gb, f"0 with quantization {self.quantization}", hint)
        _at_least("seed", self.seed, 0)
        _at_least("max_logprobs", self.max_logprobs, -1)


@dataclass(frozen=True)
class CacheConfig:
    """The pool of KV blocks."""

    block_size: int | None = None
    """Tokens a block: a sequence wastes less than one block, and a prefix is shared in whole blocks. None: 64 with the
    Triton kernels, whose tiles are pages of that size, and 16 elsewhere."""
    num_gpu_blocks_override: int | None = None
    """Blocks in the pool, on a CPU too; None measures what fits."""
    gpu_memory_utilization: float = 0.9
    """Share of the GPU's memory for weights, activations and the pool."""
    enable_prefix_caching: bool = True
    """Whether full blocks are found again by their content."""
    eviction_policy: str = "slru"
    """KV cache eviction policy. lru evicts the least recently used block; slru likewise, but blocks that were never
    found again before the others; lfu the least often used one, with ageing; cost the least recently used one, weighed
    by what attention takes to compute it again. slru finds most on a real trace: docs/benchmarks/prefix-cache.md."""

    kv_cache_dtype: str = "auto"
    """What keys and values are kept as. auto: the model's dtype. fp8, or fp8_e4m3: float8 with a scale for each block
    and KV head, half of the memory of 16 bits; tokens differ from those of auto, and there is no deterministic mode."""
    swap_space: float = 0.0
    """GiB of host memory for blocks that the pool evicts, of preempted sequences too; they come back by their content.
    0: such blocks are computed again."""

    def __post_init__(self) -> None:
        if self.block_size is not None:
            _choice("block_size", self.block_size, (1, 2, 4, 8, 16, 32, 64, 128))
        if self.num_gpu_blocks_override is not None:
            _at_least("num_gpu_blocks_override", self.num_gpu_blocks_override, 1)
        share = self.gpu_memory_utilization
        if not (_is_number(share) and 0.0 < share <= 1.0):
            raise ConfigError("gpu_memory_utilization", share, "a number above 0 and at most 1")
        if not isinstance(self.enable_prefix_caching, bool):
            raise ConfigError("enable_prefix_caching", self.enable_prefix_caching, "True or False")
        _choice("eviction_policy", self.eviction_policy, EVICTION_POLICIES)
        _choice("kv_cache_dtype", self.kv_cache_dtype, KV_CACHE_DTYPES)
        if not (_is_number(self.swap_space) and 0.0 <= self.swap_space < inf):
            raise ConfigError("swap_space", self.swap_space, "GiB of at least 0")
        if self.swap_space and not self.enable_prefix_caching:
            hint = "blocks in host memory are found by the prefix cache"
            raise ConfigError("swap_space", self.swap_space, "0 without enable_prefix_caching", hint)


@dataclass(frozen=True)
class SchedulerConfig:
    """What a step may hold."""

    max_num_seqs: int = 256
    """Sequences that run at once; each takes one token of the budget while it decodes."""
    max_num_batched_tokens: int = 2048
    """Tokens of a step, decodes first, then prefill chunks: bounds the step's time and its activations."""
    itl_bound_ms: float | None = None
    """Milliseconds that a step may take while sequences decode, where it also has prompts: their chunks get smaller so
    that it does, by the measured times of steps. None: no bound."""
    mask_wait_ms: float = 20.0
    """Most milliseconds that a step waits for the masks of its rows' grammars, which threads beside it compute. A row
    whose mask comes later gets its token in a later step."""
    scheduling_policy: str = "fcfs"
    """Name of the policy that orders admission and preemption: fcfs, priority, shortest_first, round_robin, fair
    (`scheduler/policies.py`), or one that a plugin registers."""

    def __post_init__(self) -> None:
        _at_least("max_num_seqs", self.max_num_seqs, 1)
        _at_least("max_num_batched_tokens", self.max_num_batched_tokens, 1)
        bound_ms = self.itl_bound_ms
        if bound_ms is not None and not (_is_number(bound_ms) and 0.0 < bound_ms < inf):
            raise ConfigError("itl_bound_ms", bound_ms, "milliseconds greater than 0, or None for no bound")
        if not (_is_number(self.mask_wait_ms) and 0.0 < self.mask_wait_ms < inf):
            raise ConfigError("mask_wait_ms", self.mask_wait_ms, "milliseconds greater than 0")
        if not isinstance(self.scheduling_policy, str):
            raise ConfigError("scheduling_policy", self.scheduling_policy, "the name of a policy")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                "max_num_batched_tokens",
                self.max_num_batched_tokens,
                f"at least max_num_seqs ({self.max_num_seqs})",
                "every running sequence decodes one token a step",
            )


@dataclass(frozen=True)
class SpeculationConfig:
    """Speculative decoding: drafts of a sequence's next tokens, verified in one step. They change no token."""

    speculative_method: str | None = None
    """ngram: what followed where the last tokens of prompt and output stood before. draft_model: what
    `speculative_model` gives. grammar: what a sequence's grammar leaves as the only text, which comes before the drafts
    of the other methods too. None: draft_model where there is one, else no drafts."""
    speculative_model: str | None = None
    """A draft model with the model's vocabulary: a folder, or the name of a Hugging Face repository. Its weights, and
    its keys and values in each block, take of the same memory."""
    num_speculative_tokens: int = 5
    """Most drafts of a sequence in a step; it gets as many as have paid so far, or none."""
    prompt_lookup_min: int = 2
    """Fewest last tokens that must have stood before."""
    prompt_lookup_max: int = 5
    """Most that are compared."""

    def __post_init__(self) -> None:
        if self.speculative_method is not None:
            _choice("speculative_method", self.speculative_method, SPECULATIVE_METHODS)
        model = self.speculative_model
        if model is not None and (not isinstance(model, str) or not model):
            raise ConfigError("speculative_model", model, "a folder or the name of a repository, or None")
        if model is not None and self.speculative_method in ("ngram", "grammar"):
            raise ConfigError("speculative_model", model, f"None with speculative_method {self.speculative_method}")
        if model is None and self.speculative_method == "draft_model":
            expected = "a folder or the name of a repository with speculative_method draft_model"
            raise ConfigError("speculative_model", None, expected)
        _between("num_speculative_tokens", self.num_speculative_tokens, 1, MAX_SPECULATIVE_TOKENS)
        _at_least("prompt_lookup_min", self.prompt_lookup_min, 1)
        _at_least("prompt_lookup_max", self.prompt_lookup_max, self.prompt_lookup_min)

    @property
    def method(self) -> str | None:
        """The method that counts: `speculative_method`, or draft_model where only its model is named."""
        return "draft_model" if self.speculative_model is not None else self.speculative_method

    @property
    def most_drafts(self) -> int:
        """Most drafts of a sequence in a step; 0 without speculation."""
        return 0 if self.method is None else self.num_speculative_tokens


@dataclass(frozen=True)
class ExecutorConfig:
    """Where steps run."""

    executor: str = "inline"
    """inline computes in this process, process in one of its own."""
    async_scheduling: bool | None = None
    """Whether the next step is scheduled while one runs, so that the device does not wait for the host. The tokens are
    the same. None: yes where a step can run meanwhile, in a process of its own or on a GPU."""

    def __post_init__(self) -> None:
        _choice("executor", self.executor, EXECUTORS)
        if self.async_scheduling is not None and not isinstance(self.async_scheduling, bool):
            raise ConfigError("async_scheduling", self.async_scheduling, "True, False or None")


@dataclass(frozen=True)
class ParallelConfig:
    """Processes that compute each step together. Above one they replace what `executor` names."""

    tensor_parallel_size: int = 1
    """Ranks among which each layer is divided: processes with a GPU each, or on a CPU with a part of its machine's
    threads each. A divisor of the model's attention heads and of the width of its MLPs."""
    pipeline_parallel_size: int = 1
    """Stages, each of which has some of the layers, and `tensor_parallel_size` ranks that divide these. At most as many
    as layers."""
    nnodes: int = 1
    """Machines that the ranks are divided among, in their order, each with as many. Above one this process starts those
    of machine `node_rank`, and machine 0 waits for the others."""
    node_rank: int = 0
    """Of this machine: 0 has the scheduler and serves requests, the others run `pagestream-engine` with the same
    options and compute what it plans."""
    master_addr: str = "127.0.0.1"
    """Host name or address of machine 0."""
    master_port: int = 29501
    """TCP port of machine 0 where ranks join."""
    node_secret_file: str | None = None
    """File with the secret, of at least 16 bytes, that the machines of a group prove to each other that they know.
    Needed with `nnodes` above one."""
    node_group: str = ""
    """Name of the group: a rank that gives another one than machine 0 is refused, for groups that share a secret."""
    node_join_timeout_s: float = 600.0
    """Seconds that machines wait for each other before they give up."""

    def __post_init__(self) -> None:
        _between("tensor_parallel_size", self.tensor_parallel_size, 1, MAX_RANKS)
        _between("pipeline_parallel_size", self.pipeline_parallel_size, 1, MAX_RANKS // self.tensor_parallel_size)
        self._check_nodes()

    @property
    def num_ranks(self) -> int:
        """Processes of all stages."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    def _check_nodes(self) -> None:
        _between("nnodes", self.nnodes, 1, MAX_RANKS)
        _between("node_rank", self.node_rank, 0, self.nnodes - 1)
        _between("master_port", self.master_port, 1, 65_535)
        if not isinstance(self.master_addr, str) or not self.master_addr:
            raise ConfigError("master_addr", self.master_addr, "a host name or an address")
        if not isinstance(self.node_group, str) or len(self.node_group) > _MAX_GROUP_NAME:
            raise ConfigError("node_group", self.node_group, f"a name of at most {_MAX_GROUP_NAME} characters")
        limit_s = self.node_join_timeout_s
        if not (_is_number(limit_s) and 0.0 < limit_s < inf):
            raise ConfigError("node_join_timeout_s", limit_s, "seconds above 0")
        if self.nnodes == 1:
            return
        if self.num_ranks % self.nnodes:
            expected = f"a divisor of the {self.num_ranks} ranks (tensor_parallel_size x pipeline_parallel_size)"
            raise ConfigError("nnodes", self.nnodes, expected, "each machine has as many ranks")
        if not self.node_secret_file or not isinstance(self.node_secret_file, str):
            raise ConfigError("node_secret_file", self.node_secret_file, "a file with a secret, with nnodes above 1")


@dataclass(frozen=True)
class AdapterConfig:
    """LoRA adapters, which requests name."""

    enable_lora: bool = False
    """Whether requests may name adapters."""
    max_loras: int = 32
    """Adapters that run at once; a request with another one waits."""
    max_lora_rank: int = 256
    """Largest rank of an adapter that is loaded."""
    max_cpu_loras: int = 64
    """Adapters whose matrices stay in host memory; others are read again when a request comes. At least `max_loras`."""

    def __post_init__(self) -> None:
        if not isinstance(self.enable_lora, bool):
            raise ConfigError("enable_lora", self.enable_lora, "True or False")
        _between("max_loras", self.max_loras, 1, MAX_LORAS)
        _between("max_lora_rank", self.max_lora_rank, 1, MAX_LORA_RANK)
        _at_least("max_cpu_loras", self.max_cpu_loras, self.max_loras)


@dataclass(frozen=True)
class ExtensionConfig:
    """Code of the user's."""

    plugins: Sequence[str] = ()
    """Names of modules that are imported before anything else, in each process of the engine. They register scheduling
    policies (`register_policy`) and model families (`register_family`)."""

    def __post_init__(self) -> None:
        names = self.plugins
        if isinstance(names, str) or not isinstance(names, Sequence) or not all(map(_is_module_name, names)):
            raise ConfigError("plugins", names, "names of modules, such as ['my_package.policies']")


class EngineOptions(TypedDict, total=False):
    """The flat option names, which are vLLM's; see the groups for their meaning."""

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
    max_num_seqs: int
    max_num_batched_tokens: int
    itl_bound_ms: float | None
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
    swap_space: float
    kv_cache_dtype: str
    enable_lora: bool
    max_loras: int
    max_lora_rank: int
    max_cpu_loras: int


@dataclass(frozen=True)
class EngineConfig:
    """All settings of one engine.

    Raises:
        ConfigError: a value is malformed (a `ValueError`; `.field` names it).
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    executor: ExecutorConfig = field(default_factory=ExecutorConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    extensions: ExtensionConfig = field(default_factory=ExtensionConfig)
    adapters: AdapterConfig = field(default_factory=AdapterConfig)
    place: RankPlace = field(default_factory=RankPlace)
    """Of this process among the ranks; no option."""

    def __post_init__(self) -> None:
        self._check_ranks()
        if self.model.deterministic and self.cache.kv_cache_dtype in SCALED_CACHE_DTYPES:
            hint = "a token's key is rounded to a scale that later tokens of its block may raise"
            raise ConfigError("kv_cache_dtype", self.cache.kv_cache_dtype, "auto or bfloat16 with deterministic", hint)
        if self.speculation.method is not None and self.cache.kv_cache_dtype in SCALED_CACHE_DTYPES:
            hint = "a draft that does not hold may have raised the scale of its block's other keys"
            expected = "None with kv_cache_dtype fp8"
            raise ConfigError("speculative_method", self.speculation.method, expected, hint)

    def _check_ranks(self) -> None:
        for option in ("tensor_parallel_size", "pipeline_parallel_size"):
            size = getattr(self.parallel, option)
            if size > 1 and self.model.cpu_offload_gb:
                raise UnsupportedOption(option, size, "1 with cpu_offload_gb", "ranks have none yet")

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> EngineConfig:
        """Build the groups from vLLM's flat option names, as `LLM` and the command line take them.

        Raises:
            ConfigError: an option is unknown or malformed.
        """
        options = dict(options)
        names = [name for group in _GROUPS.values() for name in group]
        unknown = sorted(set(options) - set(names))
        if unknown:
            raise ConfigError(unknown[0], options[unknown[0]], f"one of the options {', '.join(sorted(names))}")
        if "max_num_batched_tokens" in options and "max_num_seqs" not in options:
            # A small budget alone is no contradiction: fewer sequences run at once.
            _at_least("max_num_batched_tokens", options["max_num_batched_tokens"], 1)
            options["max_num_seqs"] = min(SchedulerConfig.max_num_seqs, options["max_num_batched_tokens"])
        for low, low_default, high, high_default in _BOUNDS:
            # Nor is a bound that is given alone: the other one moves with it.
            if _is_count(options.get(low)) and high not in options:
                options[high] = max(high_default, options[low])
            elif _is_count(options.get(high)) and low not in options:
                options[low] = min(low_default, options[high])
        groups = {group: {name: options[name] for name in names if name in options} for group, names in _GROUPS.items()}
        return cls(
            model=ModelConfig(**groups["model"]),
            cache=CacheConfig(**groups["cache"]),
            scheduler=SchedulerConfig(**groups["scheduler"]),
            speculation=SpeculationConfig(**groups["speculation"]),
            executor=ExecutorConfig(**groups["executor"]),
            parallel=ParallelConfig(**groups["parallel"]),
            extensions=ExtensionConfig(**groups["extensions"]),
            adapters=AdapterConfig(**groups["adapters"]),
        )


_GROUPS = {
    "model": tuple(f.name for f in fields(ModelConfig)),
    "cache": tuple(f.name for f in fields(CacheConfig)),
    "scheduler": tuple(f.name for f in fields(SchedulerConfig)),
    "speculation": tuple(f.name for f in fields(SpeculationConfig)),
    "executor": tuple(f.name for f in fields(ExecutorConfig)),
    "parallel": tuple(f.name for f in fields(ParallelConfig)),
    "extensions": tuple(f.name for f in fields(ExtensionConfig)),
    "adapters": tuple(f.name for f in fields(AdapterConfig)),
}


_LOOKUP = SpeculationConfig
_BOUNDS = (
    ("max_loras", AdapterConfig.max_loras, "max_cpu_loras", AdapterConfig.max_cpu_loras),
    ("prompt_lookup_min", _LOOKUP.prompt_lookup_min, "prompt_lookup_max", _LOOKUP.prompt_lookup_max),
)
"""Options whose value is at most another one's, with their defaults."""


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_module_name(name: object) -> bool:
    return isinstance(name, str) and all(part.isidentifier() for part in name.split("."))


def _choice(name: str, given: object, allowed: tuple[object, ...]) -> None:
    if isinstance(given, bool) or given not in allowed:
        raise ConfigError(name, given, f"one of {', '.join(map(str, allowed))}")


def _is_number(given: object) -> bool:
    return isinstance(given, (int, float)) and not isinstance(given, bool)


def _at_least(name: str, given: object, low: int) -> None:
    if isinstance(given, bool) or not isinstance(given, int) or given < low:
        raise ConfigError(name, given, f"a whole number of at least {low}")


def _between(name: str, given: object, low: int, high: int) -> None:
    if isinstance(given, bool) or not isinstance(given, int) or not low <= given <= high:
        raise ConfigError(name, given, f"a whole number from {low} to {high}")
