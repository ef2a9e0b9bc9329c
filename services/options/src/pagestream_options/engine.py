"""The engine's options, in frozen groups. A field is an option: its flag, its variable, its field of an EnginePool and
its lines of reference follow from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pagestream_options.choices import ATTENTION_BACKENDS, EVICTION_POLICIES
from pagestream_options.declaration import Option, Pool, check, declared, option
from pagestream_options.errors import ConfigError

MAX_RANKS = 64
"""Of a group."""
MAX_SPECULATIVE_TOKENS = 15
"""With the last token, what one pass of attention over a decode takes."""
SCALED_CACHE_DTYPES = ("fp8", "fp8_e4m3")
POLICIES = ("fcfs", "priority", "shortest_first", "round_robin", "fair")
"""Scheduling policies that need no plugin."""

DEFAULT_BLOCK_SIZE = 16
TRITON_BLOCK_SIZE = 64
"""Tokens a block where no option names them: a block is a tile of the Triton kernels."""

_MOST_TOKENS = 16_777_216
_MOST_GIB = 65_536
_MOST_MS = 3_600_000
_OF_GROUP = "ranks of several machines are started by `pagestream-engine --nnodes`, on each machine"


@dataclass(frozen=True)
class ModelConfig:
    """What is loaded and how it computes."""

    dtype: str = option(
        "auto",
        """Type of weights and activations, and of the KV cache unless `kv_cache_dtype` says otherwise; auto is the
        checkpoint's own.""",
        "type of weights and activations",
        choices=("auto", "float32", "float16", "bfloat16"),
        is_numeric=True,
        pool=Pool(),
    )
    max_model_len: int | None = option(
        None,
        """Most tokens of prompt and output together. Unset: what the model and the block pool allow. Given, all engines
        take the same requests; one whose block pool holds fewer tokens does not start.""",
        "most tokens of prompt and output together",
        metavar="TOKENS",
        low=2,
        is_numeric=True,
        pool=Pool(most=_MOST_TOKENS),
    )
    device: str = option(
        "auto",
        "Where the model runs. auto is the GPU where there is one.",
        "where the model runs (default: the GPU where there is one)",
        choices=("auto", "cpu", "cuda"),
        is_numeric=True,
        pool=Pool(),
    )
    enforce_eager: bool = option(
        False,
        """Whether a GPU gets each kernel of a decode by a launch of its own. Otherwise decodes are recorded as CUDA
        graphs at the start, for all numbers of sequences up to `max_num_seqs` in steps: seconds and memory at the
        start, for less time on the host in each step. A CPU has none.""",
        "launch each kernel of a GPU's decodes anew, instead of recording CUDA graphs",
        pool=Pool(),
    )
    attention_backend: str = option(
        "auto",
        """What computes attention. auto is Triton on a GPU; on a CPU C++ kernels that are compiled at the start, or
        torch where they can't be used (no compiler, or a head size that is no multiple of 16). triton needs a GPU;
        torch runs on both.""",
        "what computes attention",
        choices=ATTENTION_BACKENDS,
        is_numeric=True,
        pool=Pool(),
    )
    deterministic: bool | None = option(
        None,
        """Whether a sequence's logits are the same bit for bit in any batch, after preemption and in any chunks. Unset:
        yes on a CPU where it is free, which it is not in bfloat16 on a CPU with AMX. On a GPU its cost has not been
        measured, and unset is off.""",
        "bit-identical logits in any batch (default: on a CPU where it is free, off on a GPU)",
        is_numeric=True,
        pool=Pool(),
    )
    quantization: str | None = option(
        None,
        """int8 rounds the weights of linears to 8 bits while they are loaded, with a scale for each output;
        activations, norms, the embedding, a head that is the embedding, and routers of experts keep the dtype. Unset:
        as the checkpoint has them.""",
        "int8: quantise the linears' weights while loading; a checkpoint's own method needs no flag",
        choices=("int8",),
        is_numeric=True,
        pool=Pool(),
    )
    shared_weights_gb: float = option(
        0.0,
        """GiB of disk, below `$XDG_CACHE_HOME/pagestream/weights`, for weights in the layout of the CPU's deterministic
        linears: all engines of the machine map the same pages, and start without laying them out anew. 0: each engine
        has its own memory, as it has where its linears are others.""",
        "disk for weights that engines share (of serve with several engines: 32)",
        metavar="GIB",
        low=0,
        unit="GiB",
        pool=Pool(most=1_048_576, text="For a volume of the node that `template` mounts there."),
    )
    cpu_offload_gb: float = option(
        0.0,
        """GiB of host memory for weights of a GPU's model, at most: of as many layers as fit, spread evenly. Before a
        layer's turn its weights are copied to one of two buffers, while the layers before it compute, which makes steps
        longer; decodes are not recorded as CUDA graphs then. 0: all weights are on the GPU. A CPU refuses it.""",
        "host memory for weights of a GPU's model",
        metavar="GIB",
        low=0,
        unit="GiB",
        pool=Pool(most=_MOST_GIB, text="Part of the pod's memory."),
    )
    seed: int = option(
        0,
        "Seed of the generator that draws seeds for requests that bring none.",
        "seed of the generator that draws seeds for requests without one",
        metavar="N",
        low=0,
        pool=Pool(most=2**53),
    )
    max_logprobs: int = option(
        20,
        "Most log probabilities that a request may ask for at each token; -1 is no limit.",
        "log probabilities that a request may ask for; -1 is no limit",
        metavar="N",
        low=-1,
        pool=Pool(most=1_000_000),
    )

    def __post_init__(self) -> None:
        check(self, ConfigError)
        if self.cpu_offload_gb and self.quantization is not None:
            hint = "weights of 8 bits have layouts of their own, which stay on the device"
            raise ConfigError("cpu_offload_gb", self.cpu_offload_gb, f"0 with quantization {self.quantization}", hint)


@dataclass(frozen=True)
class CacheConfig:
    """The pool of KV blocks."""

    block_size: int | None = option(
        None,
        """Tokens in a KV block: a sequence wastes less than one block, and a prefix is shared in whole blocks. Unset:
        64 with the Triton kernels, whose tiles are pages of that size, and 16 elsewhere. A GPU needs 8 or more.""",
        "tokens in a KV block",
        metavar="TOKENS",
        choices=(1, 2, 4, 8, 16, 32, 64, 128),
        is_numeric=True,
        pool=Pool(),
    )
    num_gpu_blocks_override: int | None = option(
        None,
        "KV blocks in the pool, on a GPU or a CPU. Unset: as many as fit, by measurement.",
        "KV blocks, instead of what fits",
        metavar="N",
        low=1,
        pool=Pool(most=2**31 - 1),
    )
    gpu_memory_utilization: float = option(
        0.9,
        "Share of the GPU's memory for weights, activations and the pool of KV blocks.",
        "share of the GPU's memory that an engine may use",
        metavar="SHARE",
        low=0,
        high=1,
        is_above=True,
        unit="a number",
        pool=Pool(),
    )
    enable_prefix_caching: bool = option(
        True,
        "Whether full blocks are found again by their content, and shared by prompts that begin alike.",
        "share the KV blocks of equal prefixes",
        pool=Pool(),
    )
    eviction_policy: str = option(
        "slru",
        """KV cache eviction policy. lru evicts the least recently used block; slru likewise, but blocks that were never
        found again before the others; lfu the block that was found least often, with ageing; cost the one whose hits,
        times what its tokens cost to compute again, are least, with ageing. slru finds most on a real trace:
        docs/benchmarks/prefix-cache.md.""",
        "KV cache eviction policy",
        choices=EVICTION_POLICIES,
        pool=Pool(),
    )
    kv_cache_dtype: str = option(
        "auto",
        """What keys and values are kept as. auto: the model's dtype. fp8, or fp8_e4m3: float8 with a scale for each
        block and KV head, half of the memory of 16 bits; tokens differ from those of auto, and there is no
        deterministic mode.""",
        "what keys and values are kept as",
        choices=("auto", "bfloat16", *SCALED_CACHE_DTYPES),
        is_numeric=True,
        pool=Pool(),
    )
    swap_space: float = option(
        0.0,
        """GiB of host memory for KV blocks that the pool evicts, of preempted sequences too; they are found by their
        content and copied back when they are needed again. 0: such blocks are computed again.""",
        "host memory of each engine for KV blocks that are evicted",
        metavar="GIB",
        low=0,
        unit="GiB",
        pool=Pool(most=_MOST_GIB, text="Part of the pod's memory."),
    )

    def __post_init__(self) -> None:
        check(self, ConfigError)
        if self.swap_space and not self.enable_prefix_caching:
            hint = "blocks in host memory are found by the prefix cache"
            raise ConfigError("swap_space", self.swap_space, "0 without enable_prefix_caching", hint)


@dataclass(frozen=True)
class SchedulerConfig:
    """What a step may hold."""

    max_num_seqs: int = option(
        256,
        "Most sequences that run at once; each takes one token of the budget while it decodes.",
        "sequences that run at once",
        metavar="N",
        low=1,
        pool=Pool(most=65_536),
    )
    max_num_batched_tokens: int = option(
        2048,
        "Most tokens of a step, decodes first, then prefill chunks: bounds the step's time and its activations.",
        "token budget of one step",
        metavar="TOKENS",
        low=1,
        pool=Pool(most=_MOST_TOKENS),
    )
    itl_bound_ms: float | None = option(
        None,
        """Milliseconds that a step may take while sequences decode, where it also has prompts: their chunks get smaller
        so that it does, by the measured times of steps. Unset: no bound.""",
        "time that a step with prompts and decodes may take (default: any)",
        metavar="MS",
        low=0,
        is_above=True,
        unit="milliseconds",
        pool=Pool(most=_MOST_MS),
    )
    prefill_spread_steps: int = option(
        1,
        """Steps over which the prompt tokens that wait are spread while sequences decode, 384 tokens each at least, so
        that running streams do not wait for all of them at once; it costs throughput. 1: as many as the budget holds.
        No effect under itl_bound_ms.""",
        "steps over which waiting prompts are spread while sequences decode",
        metavar="STEPS",
        low=1,
        pool=Pool(most=1024),
    )
    mask_wait_ms: float = option(
        20.0,
        """Most milliseconds that a step waits for the masks of its rows' grammars, which threads beside it compute. A
        row whose mask comes later gets its token in a later step. A step in which no row can be sampled waits five
        times as long for one of them, and a rank for the masks that the first rank has.""",
        "time that a step waits for the masks of structured outputs",
        metavar="MS",
        low=0,
        is_above=True,
        unit="milliseconds",
        pool=Pool(most=_MOST_MS),
    )
    scheduling_policy: str = option(
        "fcfs",
        """Name of the policy that orders admission and preemption: fcfs (first come first served), priority (by class;
        the first class interrupts lower ones), shortest_first, round_robin, fair (equal tokens for all tenants), or one
        that a module of `plugins` registers.""",
        f"{', '.join(POLICIES)}, or a plugin's",
        metavar="NAME",
        low=1,
        expected="the name of a policy",
        pool=Pool(most=200),
    )

    def __post_init__(self) -> None:
        check(self, ConfigError)
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

    speculative_method: str | None = option(
        None,
        """Speculative decoding method: where drafts come from; the tokens stay the same. ngram: what followed where the
        last tokens of prompt and output stood before. draft_model: what `speculative_model` gives. grammar: what a
        sequence's grammar leaves as the only text, which comes before the drafts of the other methods too. Unset:
        draft_model where there is one, else no drafts.""",
        "speculative decoding method (default: none)",
        choices=("ngram", "draft_model", "grammar"),
        pool=Pool(),
    )
    speculative_model: str | None = option(
        None,
        """A draft model with the model's vocabulary: a folder, or the name of a Hugging Face repository. Its weights,
        and its keys and values in each block, take of the same memory.""",
        "draft model with the model's vocabulary: folder or repository (default: none)",
        metavar="MODEL",
        low=1,
        expected="a folder or the name of a repository, or None",
        pool=Pool(most=4096),
    )
    num_speculative_tokens: int = option(
        5,
        "Most drafts of a sequence in a step; it gets as many as have paid so far, or none.",
        "most draft tokens of a sequence in a step",
        metavar="N",
        low=1,
        high=MAX_SPECULATIVE_TOKENS,
        pool=Pool(),
    )
    prompt_lookup_min: int = option(
        2,
        "Fewest last tokens that must have stood before, for ngram.",
        "fewest last tokens that ngram must have found before",
        metavar="TOKENS",
        low=1,
        pool=Pool(most=1024),
    )
    prompt_lookup_max: int = option(
        5,
        "Most last tokens that are compared, for ngram; at least `prompt_lookup_min`.",
        "most last tokens that ngram compares",
        metavar="TOKENS",
        low=1,
        pool=Pool(most=1024),
    )

    def __post_init__(self) -> None:
        check(self, ConfigError)
        model = self.speculative_model
        if model is not None and self.speculative_method in ("ngram", "grammar"):
            raise ConfigError("speculative_model", model, f"None with speculative_method {self.speculative_method}")
        if model is None and self.speculative_method == "draft_model":
            expected = "a folder or the name of a repository with speculative_method draft_model"
            raise ConfigError("speculative_model", None, expected)
        if self.prompt_lookup_max < self.prompt_lookup_min:
            expected = f"a whole number of at least {self.prompt_lookup_min} (prompt_lookup_min)"
            raise ConfigError("prompt_lookup_max", self.prompt_lookup_max, expected)

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

    executor: str = option(
        "inline",
        "Where steps run. inline computes in the engine's process, process in one of its own.",
        "where steps run: in the engine's process or in another",
        choices=("inline", "process"),
        pool=Pool(),
    )
    async_scheduling: bool | None = option(
        None,
        """Whether the next step is scheduled while one runs, so that the device does not wait for the host. The tokens
        are the same. Unset: yes where a step can run meanwhile, in a process of its own or on a GPU.""",
        "schedule the next step while one runs (default: where a step can run meanwhile)",
        pool=Pool(),
    )

    def __post_init__(self) -> None:
        check(self, ConfigError)


@dataclass(frozen=True)
class ParallelConfig:
    """Processes that compute each step together. Above one they replace what `executor` names.

    An EnginePool has `parallel` and `nodes` in their place.
    """

    tensor_parallel_size: int = option(
        1,
        """Ranks among which each layer is divided: processes with a GPU each, or on a CPU with a part of its machine's
        threads each. A divisor of the model's attention heads and of the width of its MLPs.""",
        "processes that divide each layer, in every engine",
        metavar="N",
        low=1,
        high=MAX_RANKS,
        is_numeric=True,
    )
    pipeline_parallel_size: int = option(
        1,
        """Stages, each of which has some of the layers, and `tensor_parallel_size` ranks that divide these. At most as
        many as layers.""",
        "stages that divide the layers, in every engine",
        metavar="N",
        low=1,
        high=MAX_RANKS,
    )
    nnodes: int = option(
        1,
        """Machines that the ranks are divided among, in their order, each with as many. Above one this process starts
        those of machine `node_rank`, and machine 0 waits for the others.""",
        "machines that the ranks are divided among",
        metavar="N",
        low=1,
        high=MAX_RANKS,
        elsewhere=_OF_GROUP,
    )
    node_rank: int = option(
        0,
        """Of this machine: 0 has the scheduler and serves requests, the others run `pagestream-engine` with the same
        options and compute what it plans.""",
        "number of this machine; only 0 serves requests",
        metavar="N",
        low=0,
        high=MAX_RANKS - 1,
        elsewhere=_OF_GROUP,
    )
    master_addr: str = option(
        "127.0.0.1",
        "Host name or address of machine 0.",
        "address of machine 0",
        metavar="HOST",
        low=1,
        expected="a host name or an address",
        elsewhere=_OF_GROUP,
    )
    master_port: int = option(
        29501,
        "TCP port of machine 0 where ranks join.",
        "port of machine 0, where the others join",
        metavar="PORT",
        low=1,
        high=65_535,
        elsewhere=_OF_GROUP,
    )
    node_secret_file: str | None = option(
        None,
        """File with the secret, of at least 16 bytes, that the machines of a group prove to each other that they know.
        Needed with `nnodes` above one.""",
        "file with the secret of the machines of a group",
        metavar="FILE",
        expected="a file with a secret",
        elsewhere=_OF_GROUP,
    )
    node_group: str = option(
        "",
        """Name of the group: a rank that gives another one than machine 0 is refused, for groups that share a
        secret.""",
        "name of the group of machines, for groups that share a secret",
        metavar="NAME",
        high=253,
        expected="a name of at most 253 characters",
        elsewhere=_OF_GROUP,
    )
    node_join_timeout_s: float = option(
        600.0,
        "Seconds that machines wait for each other before they give up.",
        "seconds to wait for the other machines",
        metavar="S",
        low=0,
        is_above=True,
        unit="seconds",
        elsewhere=_OF_GROUP,
    )

    def __post_init__(self) -> None:
        check(self, ConfigError)
        most = MAX_RANKS // self.tensor_parallel_size
        if self.pipeline_parallel_size > most:
            raise ConfigError("pipeline_parallel_size", self.pipeline_parallel_size, f"a whole number from 1 to {most}")
        if self.node_rank >= self.nnodes:
            raise ConfigError("node_rank", self.node_rank, f"a whole number from 0 to {self.nnodes - 1}")
        if self.nnodes == 1:
            return
        if self.num_ranks % self.nnodes:
            expected = f"a divisor of the {self.num_ranks} ranks (tensor_parallel_size x pipeline_parallel_size)"
            raise ConfigError("nnodes", self.nnodes, expected, "each machine has as many ranks")
        if not self.node_secret_file:
            raise ConfigError("node_secret_file", self.node_secret_file, "a file with a secret, with nnodes above 1")

    @property
    def num_ranks(self) -> int:
        """Processes of all stages."""
        return self.tensor_parallel_size * self.pipeline_parallel_size


@dataclass(frozen=True)
class ExtensionConfig:
    """Code of the user's."""

    plugins: Sequence[str] = option(
        (),
        """Names of modules that are imported before anything else, in each process of the engine. They register
        scheduling policies (`register_policy`) and model families (`register_family`).""",
        "modules that register policies and model families, imported first; such as a.policies,b.families",
        metavar="MODULES",
        expected="names of modules, such as ['my_package.policies']",
        pool=Pool(
            most=32,
            text="They are in the image, or in a volume that `PYTHONPATH` in `template.env` names.",
            item_pattern=r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*$",
        ),
        is_numeric=True,
    )

    def __post_init__(self) -> None:
        check(self, ConfigError)
        if not all(map(_is_module_name, self.plugins)):
            raise ConfigError("plugins", self.plugins, declared(type(self))["plugins"].wanted)


@dataclass(frozen=True)
class AdapterConfig:
    """LoRA adapters, which requests name."""

    enable_lora: bool = option(
        False,
        "Whether requests may name LoRA adapters.",
        "let requests name LoRA adapters",
        is_numeric=True,
        pool=Pool(),
    )
    max_loras: int = option(
        32,
        "Adapters that run at once; a request with another one waits.",
        "adapters that run at once",
        metavar="N",
        low=1,
        high=256,
        pool=Pool(),
    )
    max_lora_rank: int = option(
        256,
        "Largest rank of an adapter that is loaded.",
        "largest rank of an adapter",
        metavar="N",
        low=1,
        high=512,
        pool=Pool(),
    )
    max_cpu_loras: int = option(
        64,
        """Adapters whose matrices stay in host memory, at least `max_loras`; others are read again when a request
        comes.""",
        "adapters that stay in host memory",
        metavar="N",
        low=1,
        pool=Pool(most=65_536, text="Part of the pod's memory."),
    )

    def __post_init__(self) -> None:
        check(self, ConfigError)
        if self.max_cpu_loras < self.max_loras:
            expected = f"a whole number of at least {self.max_loras} (max_loras)"
            raise ConfigError("max_cpu_loras", self.max_cpu_loras, expected)


GROUPS: Mapping[str, type] = {
    "model": ModelConfig,
    "cache": CacheConfig,
    "scheduler": SchedulerConfig,
    "speculation": SpeculationConfig,
    "executor": ExecutorConfig,
    "parallel": ParallelConfig,
    "extensions": ExtensionConfig,
    "adapters": AdapterConfig,
}
"""The groups by the names that they have in `EngineConfig`."""
ENGINE_OPTIONS: Mapping[str, Option] = {name: each for kind in GROUPS.values() for name, each in declared(kind).items()}
"""All options by their names, which are vLLM's wherever vLLM has the thing."""


def grouped(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the groups that flat options make.

    Raises:
        ConfigError: an option is unknown or malformed.
    """
    unknown = sorted(set(options) - set(ENGINE_OPTIONS))
    if unknown:
        raise ConfigError(unknown[0], options[unknown[0]], f"one of the options {', '.join(sorted(ENGINE_OPTIONS))}")
    given = dict(options)
    if "max_num_batched_tokens" in given and "max_num_seqs" not in given:
        # A small budget alone is no contradiction: fewer sequences run at once.
        budget = ENGINE_OPTIONS["max_num_batched_tokens"]
        if not budget.accepts(given[budget.name]):
            raise ConfigError(budget.name, given[budget.name], budget.wanted)
        given["max_num_seqs"] = min(ENGINE_OPTIONS["max_num_seqs"].default, given[budget.name])
    for low, high in (("max_loras", "max_cpu_loras"), ("prompt_lookup_min", "prompt_lookup_max")):
        # Nor is a bound that is given alone: the other one moves with it.
        if high not in given and _is_count(given.get(low)):
            given[high] = max(ENGINE_OPTIONS[high].default, given[low])
        elif low not in given and _is_count(given.get(high)):
            given[low] = min(ENGINE_OPTIONS[low].default, given[high])
    return {
        group: kind(**{name: given[name] for name in declared(kind) if name in given}) for group, kind in GROUPS.items()
    }


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_module_name(name: object) -> bool:
    return isinstance(name, str) and all(part.isidentifier() for part in name.split("."))
