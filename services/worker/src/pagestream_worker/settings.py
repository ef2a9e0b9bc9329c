"""Settings of an engine process: command line, then `PAGESTREAM_<GROUP>__<FIELD>`, then the defaults here."""

import argparse
import dataclasses
import math
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os import getpid
from pathlib import Path
from typing import Any

from pagestream_engine.config import (
    ATTENTION_BACKENDS,
    DEVICES,
    DTYPES,
    EVICTION_POLICIES,
    EXECUTORS,
    KV_CACHE_DTYPES,
    QUANTIZATIONS,
    SPECULATIVE_METHODS,
    EngineConfig,
    EngineOptions,
)
from pagestream_engine.errors import ConfigError
from pagestream_streams import StreamsSettings, settings_from_environment
from pagestream_streams.protocol.keys import DEFAULT_PARTITIONS, MAX_PARTITIONS
from pagestream_streams.protocol.output_formats import (
    BY_TEMPLATE,
    NONE,
    REASONING_PARSERS,
    TOOL_CALL_PARSERS,
    OutputParsers,
)
from pagestream_telemetry.addresses import ALL_ADDRESSES
from pagestream_telemetry.environment import fields_of, out_of_range, read_environment, split_names, variable_of
from pagestream_telemetry.errors import VariableError
from pagestream_telemetry.settings import TelemetrySettings, telemetry_settings

from pagestream_worker.chat_templates import ChatTemplateError, ChatTemplateOptions, given_arguments, given_template
from pagestream_worker.ladder.settings import DegradationSettings, degradation_settings
from pagestream_worker.standby import STANDBY_STATES

WORKER, ENGINE = "WORKER", "ENGINE"
ENGINE_CORES = ("process", "inline")


@dataclass(frozen=True)
class WorkerSettings:
    """The group WORKER: what the process serves, where its Redis is, and its time limits."""

    model: str
    """Folder with config.json, *.safetensors and tokenizer.json, or a Hugging Face repository."""
    redis_url: str
    """Address of the Redis: redis://, rediss:// (TLS), unix://, redis+sentinel:// or redis+cluster://."""
    served_model_name: str
    """What clients ask for; not given: the folder's name."""
    engine_id: str
    """Name in leases and logs; leases add a boot nonce to it. Not given: host name and process id."""
    engine_core: str = "process"
    """Where the engine (scheduler, model) runs: "process": in a process of its own, apart from the event loop that
    talks to Redis; "inline": on a thread of this process."""
    standby: str = ""
    """How far to start before waiting for a line on standard input, and only then joining: "imported": the modules are
    imported; "loaded": the model is loaded too. Not given: join at once."""
    tool_call_parser: str = ""
    """Format of the model's tool calls, by the name of vLLM's parser; "none": calls are content. Not given: as the chat
    template says. Models of `models` have what their templates say."""
    reasoning_parser: str = ""
    """Format of its reasoning, likewise."""
    chat_template: str = ""
    """File with the model's chat template, or its text, in place of what its folder has. Models of `models` have those
    of their folders."""
    default_chat_template_kwargs: str = ""
    """Values for the model's chat template where a request gives none, as a JSON object; likewise."""
    partitions: int = DEFAULT_PARTITIONS
    """Partitions of a model that Redis does not know yet; a published number stays."""
    metrics_port: int | None = None
    """TCP port of /healthz, /readyz and /metrics; None: no endpoint."""
    metrics_host: str = ALL_ADDRESSES
    """Address of that port; ::, all of this machine, IPv4 and IPv6: probes and scrapers come from other machines."""
    profile_dir: Path | None = None
    """Folder for torch profiler traces, which SIGUSR2 or POST /debug/profile asks for; None: there are none."""
    profile_steps: int = 10
    """Steps of a profile that a signal asks for."""
    idle_poll_s: float = 0.1
    """Seconds between claims without a doorbell message: the delay that a lost message costs."""
    finish_timeout_s: float = 0.0
    """Seconds after SIGTERM for which requests with tokens go on here, where all other engines have another numerics
    fingerprint (a rollout). In every other case, and after that, they are handed back."""
    drain_timeout_s: float = 8.0
    """Seconds for the last appends and the hand-back after that."""
    exit_timeout_s: float = 9.5
    """Seconds from the end of serving after which the process exits, whatever still hangs."""
    stall_timeout_s: float = 120.0
    """Seconds that one step may run before the watchdog exits the process, so that its requests go on elsewhere."""
    retry_delay_s: float = 0.1
    """Seconds between retries while Redis is away."""
    append_limit: int = 256
    """Most entries of one request in one append, so that a backlog after an outage does not block Redis."""
    models: Sequence[str] = ()
    """Further models that this engine may serve, one at a time, as NAME=FOLDER: see docs/decisions/0246."""
    enable_sleep_mode: bool = False
    """Whether operators may put this engine to sleep, have it unload its model, and have it load one. So they may where
    it has `models`."""
    wake_on_demand: bool = True
    """Whether requests wake it; False: an operator does."""
    min_serve_s: float = 10.0
    """Seconds for which a model is served before another, for which requests wait, takes its engine."""
    max_serve_s: float = 60.0
    """Seconds after which it takes it although requests that the engine has begun have no token yet; twice as many the
    next times, where they have none then, up to 16 times as many."""
    switch_finish_s: float = 2.0
    """Seconds in which running requests may end before an engine changes its model. The others are handed back."""
    load_timeout_s: float = 600.0
    """Seconds in which a model has to be loaded that takes the place of another. Then the engine goes back to the one
    that it had, and tries again later."""
    kill_timeout_s: float = 60.0
    """Seconds in which a killed engine has to end and free its memory before a model is loaded. Then this process ends
    as well."""
    kept_log_bytes: int = 128 * 1024 * 1024
    """Bytes of written entries that are kept to be sent again where Redis has lost them: about 3 million tokens without
    log probabilities, the last minutes of any engine.
    """

    def parsers_of(self, name: str) -> OutputParsers:
        """Return which parsers the card of a model names."""
        is_first = name == self.served_model_name
        return OutputParsers(self.tool_call_parser, self.reasoning_parser) if is_first else BY_TEMPLATE

    def chat_of(self, name: str) -> ChatTemplateOptions:
        """Return what options say of the chat template of a model."""
        is_first = name == self.served_model_name
        if not is_first:
            return ChatTemplateOptions()
        return ChatTemplateOptions(self.chat_template, self.default_chat_template_kwargs)

    @property
    def changes_models(self) -> bool:
        """Whether the model that this process serves may change."""
        return bool(self.models) or self.enable_sleep_mode

    @property
    def folders(self) -> dict[str, str]:
        """The folders or repositories of all models by the names that clients ask for, the first one first."""
        return {self.served_model_name: self.model, **dict(_named_folder(each) for each in self.models)}


_ENGINE_OPTIONS = (
    "dtype",
    "device",
    "enforce_eager",
    "attention_backend",
    "deterministic",
    "max_model_len",
    "quantization",
    "shared_weights_gb",
    "cpu_offload_gb",
    "seed",
    "max_logprobs",
    "block_size",
    "num_gpu_blocks_override",
    "gpu_memory_utilization",
    "enable_prefix_caching",
    "eviction_policy",
    "kv_cache_dtype",
    "swap_space",
    "max_num_seqs",
    "max_num_batched_tokens",
    "itl_bound_ms",
    "mask_wait_ms",
    "scheduling_policy",
    "speculative_method",
    "speculative_model",
    "num_speculative_tokens",
    "prompt_lookup_min",
    "prompt_lookup_max",
    "executor",
    "async_scheduling",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "nnodes",
    "node_rank",
    "master_addr",
    "master_port",
    "node_secret_file",
    "node_group",
    "node_join_timeout_s",
    "plugins",
    "enable_lora",
    "max_loras",
    "max_lora_rank",
    "max_cpu_loras",
)


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Add the engine's options, named as vLLM's; one that is not given keeps the engine's default."""
    group = parser.add_argument_group("engine", "defaults are the engine's own", argument_default=argparse.SUPPRESS)
    group.add_argument("--dtype", choices=DTYPES, help="type of weights and activations")
    group.add_argument("--device", choices=DEVICES, help="where the model runs (default: the GPU where there is one)")
    group.add_argument(
        "--enforce-eager", action=argparse.BooleanOptionalAction, help="launch each kernel of a GPU's decodes anew"
    )
    group.add_argument("--attention-backend", choices=ATTENTION_BACKENDS, help="what computes attention")
    group.add_argument(
        "--deterministic",
        action=argparse.BooleanOptionalAction,
        help="bit-identical logits in any batch (default: on a CPU where it is free, off on a GPU)",
    )
    group.add_argument("--max-model-len", type=int, metavar="TOKENS", help="most tokens of prompt and output together")
    group.add_argument("--quantization", choices=QUANTIZATIONS, help="quantise the linears' weights while loading")
    group.add_argument("--shared-weights-gb", type=float, metavar="GIB", help="disk for weights that engines share")
    group.add_argument("--cpu-offload-gb", type=float, metavar="GIB", help="host memory for weights of a GPU's model")
    group.add_argument("--seed", type=int, help="seed of the generator that draws seeds for requests without one")
    group.add_argument(
        "--max-logprobs", type=int, metavar="N", help="log probabilities that a request may ask for; -1 is no limit"
    )
    group.add_argument("--block-size", type=int, metavar="TOKENS", help="tokens in a KV block")
    group.add_argument("--num-gpu-blocks-override", type=int, metavar="N", help="KV blocks, instead of what fits")
    group.add_argument("--gpu-memory-utilization", type=float, metavar="SHARE", help="share of the GPU's memory")
    group.add_argument(
        "--enable-prefix-caching", action=argparse.BooleanOptionalAction, help="share KV blocks of equal prefixes"
    )
    group.add_argument("--eviction-policy", choices=EVICTION_POLICIES, help="KV cache eviction policy")
    group.add_argument("--kv-cache-dtype", choices=KV_CACHE_DTYPES, help="what keys and values are kept as")
    group.add_argument("--swap-space", type=float, metavar="GIB", help="host memory for evicted KV blocks")
    group.add_argument("--max-num-seqs", type=int, metavar="N", help="sequences that run at once")
    group.add_argument("--max-num-batched-tokens", type=int, metavar="TOKENS", help="token budget of one step")
    group.add_argument(
        "--itl-bound-ms",
        type=float,
        metavar="MS",
        help="time that a step with prompts and decodes may take (default: any)",
    )
    group.add_argument(
        "--scheduling-policy", metavar="NAME", help="fcfs, priority, shortest_first, round_robin, fair, or a plugin's"
    )
    group.add_argument(
        "--speculative-method",
        choices=SPECULATIVE_METHODS,
        help="speculative decoding method (default: none)",
    )
    group.add_argument(
        "--speculative-model", metavar="MODEL", help="draft model with the model's vocabulary: folder or repository"
    )
    group.add_argument(
        "--num-speculative-tokens", type=int, metavar="N", help="most draft tokens of a sequence in a step"
    )
    group.add_argument(
        "--prompt-lookup-min", type=int, metavar="TOKENS", help="fewest last tokens that ngram must have found before"
    )
    group.add_argument("--prompt-lookup-max", type=int, metavar="TOKENS", help="most last tokens that ngram compares")
    group.add_argument("--enable-lora", action=argparse.BooleanOptionalAction, help="let requests name LoRA adapters")
    group.add_argument("--max-loras", type=int, metavar="N", help="adapters that run at once")
    group.add_argument("--max-lora-rank", type=int, metavar="N", help="largest rank of an adapter")
    group.add_argument("--max-cpu-loras", type=int, metavar="N", help="adapters that stay in host memory")
    group.add_argument("--executor", choices=EXECUTORS, help="where steps run: in the engine's process or in another")
    group.add_argument(
        "--async-scheduling",
        action=argparse.BooleanOptionalAction,
        help="schedule the next step while one runs (default: where a step can run meanwhile)",
    )
    group.add_argument("--tensor-parallel-size", type=int, metavar="N", help="processes that divide each layer")
    group.add_argument("--pipeline-parallel-size", type=int, metavar="N", help="stages that divide the layers")
    group.add_argument("--nnodes", type=int, metavar="N", help="machines that the ranks are divided among")
    group.add_argument("--node-rank", type=int, metavar="N", help="number of this machine; only 0 serves requests")
    group.add_argument("--master-addr", metavar="HOST", help="address of machine 0")
    group.add_argument("--master-port", type=int, metavar="PORT", help="port of machine 0, where the others join")
    group.add_argument("--node-secret-file", metavar="FILE", help="file with the secret of the machines of a group")
    group.add_argument("--node-join-timeout-s", type=float, metavar="S", help="seconds to wait for the other machines")
    group.add_argument(
        "--plugins",
        type=split_names,
        metavar="MODULES",
        help="modules that register policies and model families, imported first; such as a.policies,b.families",
    )


def engine_config(options: argparse.Namespace, environ: Mapping[str, str] | None = None) -> EngineConfig:
    """Return the engine's settings: parsed options, then variables of the group ENGINE.

    Raises:
        ConfigError: an option is out of range.
        VariableError: a variable is unknown, malformed or out of range.
    """
    given = read_environment(environ or {}, {ENGINE: fields_of(EngineOptions)})[ENGINE]
    flags: dict[str, Any] = {name: getattr(options, name) for name in _ENGINE_OPTIONS if hasattr(options, name)}
    try:
        return EngineConfig.from_options(given | flags)
    except ConfigError as error:
        if error.field in given and error.field not in flags:
            raise VariableError(variable_of(ENGINE, error.field), str(error)) from error
        raise


def _engine_name(text: str) -> str:
    if not text or ":" in text or any(character.isspace() for character in text):
        raise argparse.ArgumentTypeError(f"{text!r} was given, a name without spaces and colons is expected")
    return text


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} was given, a whole number of at least 1 is expected")
    return int(text)


def _partition_count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= MAX_PARTITIONS:
        raise argparse.ArgumentTypeError(f"{text!r} was given, a whole number from 1 to {MAX_PARTITIONS} is expected")
    return int(text)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of `pagestream-engine`; an option that is not given may come from the environment."""
    parser = argparse.ArgumentParser(
        prog="pagestream-engine",
        allow_abbrev=False,
        description="Runs a model on requests from Redis. Every option is a variable as well: "
        "PAGESTREAM_WORKER__<OPTION>, and PAGESTREAM_ENGINE__<OPTION> for the engine's.",
    )
    parser.add_argument(
        "model", metavar="MODEL", nargs="?", help="folder with config.json, safetensors, tokenizer.json"
    )
    parser.add_argument("--redis", metavar="URL", help="address of the Redis, such as redis://127.0.0.1:6379/0")
    parser.add_argument("--served-model-name", metavar="NAME", help="model's name in the API (default: the folder's)")
    parser.add_argument(
        "--engine-id",
        type=_engine_name,
        metavar="ID",
        help="name in leases and logs (default: host name and process id)",
    )
    parser.add_argument(
        "--engine-core",
        choices=ENGINE_CORES,
        help="run the engine in a process of its own (default), or on a thread of this one",
    )
    parser.add_argument(
        "--standby",
        choices=STANDBY_STATES,
        help="start this far, and join after a line on standard input (default: join at once)",
    )
    parser.add_argument(
        "--partitions",
        type=_partition_count,
        metavar="N",
        help=f"partitions of a model new to this Redis, at most {MAX_PARTITIONS} (default {DEFAULT_PARTITIONS})",
    )
    parser.add_argument(
        "--models",
        type=split_names,
        metavar="LIST",
        help="further models that it may serve, one at a time: NAME=FOLDER,NAME=FOLDER",
    )
    parser.add_argument(
        "--enable-sleep-mode",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="let operators put this engine to sleep, and load and unload its model",
    )
    parser.add_argument(
        "--tool-call-parser",
        choices=(*TOOL_CALL_PARSERS, NONE),
        metavar="NAME",
        help="format of the model's tool calls (default: as its chat template says)",
    )
    parser.add_argument(
        "--reasoning-parser",
        choices=(*REASONING_PARSERS, NONE),
        metavar="NAME",
        help="format of its reasoning (default: as its chat template says)",
    )
    parser.add_argument(
        "--chat-template", metavar="FILE", help="Jinja template of chats, or its text (default: the model's own)"
    )
    parser.add_argument(
        "--default-chat-template-kwargs",
        metavar="JSON",
        help="values for the chat template where a request gives none, as a JSON object",
    )
    parser.add_argument("--metrics-port", type=_count, metavar="PORT", help="serve /healthz, /readyz and /metrics")
    parser.add_argument("--metrics-host", metavar="HOST", help="where that port listens (default ::, all addresses)")
    parser.add_argument("--profile-dir", type=Path, metavar="DIR", help="folder for profiles on demand (default: none)")
    parser.add_argument("--otlp-endpoint", metavar="URL", help="send metrics and spans there, by OTLP/gRPC")
    parser.add_argument("--log-level", metavar="LEVEL", help="lowest level written (default INFO)")
    add_engine_options(parser)
    return parser


_READ = {"chat_template": given_template, "default_chat_template_kwargs": given_arguments}
"""Fields that are given in other forms, or have to be checked, with what reads them."""
_RENAMED = {"redis_url": "redis"}
"""Fields whose option and variable have another name."""


def worker_fields() -> dict[str, Any]:
    """Return the variables of the group WORKER with their types."""
    return {_RENAMED.get(name, name): kind for name, kind in fields_of(WorkerSettings).items()}


def worker_settings(options: argparse.Namespace, environ: Mapping[str, str] | None = None) -> WorkerSettings:
    """Return the worker's settings: parsed options, then variables of the group WORKER.

    Raises:
        VariableError: a variable is unknown, malformed or out of range.
        ValueError: the model or the Redis address is given nowhere.
    """
    fields = worker_fields()
    given = read_environment(environ or {}, {WORKER: fields})[WORKER]
    _check(given)
    flags = {name: getattr(options, name) for name in fields if getattr(options, name, None) is not None}
    values = given | flags
    for name, option in (("model", "MODEL"), ("redis", "--redis")):
        if not values.get(name):
            raise ValueError(f"{option} is needed; give it, or set {variable_of(WORKER, name)}")
    values["served_model_name"] = values.get("served_model_name") or Path(values["model"]).resolve().name
    values["engine_id"] = values.get("engine_id") or f"{socket.gethostname()}-{getpid()}"
    for name, read in _READ.items():
        if values.get(name):
            try:
                values[name] = read(values[name])
            except ChatTemplateError as error:
                option = f"--{name.replace('_', '-')}" if name in flags else variable_of(WORKER, name)
                raise ValueError(f"{option}: {error}") from error
    settings = WorkerSettings(redis_url=values.pop("redis"), **values)
    if len(settings.folders) <= len(settings.models):
        raise ValueError(f"--models: {','.join(settings.models)} was given, a name for each model is expected")
    if settings.changes_models and settings.engine_core != "process":
        raise ValueError("--engine-core inline serves one model; --models and --enable-sleep-mode need a process")
    return settings


def _named_folder(text: str) -> tuple[str, str]:
    """Split NAME=FOLDER. ValueError where one of them is missing."""
    name, _, folder = text.partition("=")
    if not name or not folder:
        raise ValueError(f"--models: {text!r} was given, NAME=FOLDER is expected")
    return name, folder


_CHECKED_TEXTS = {"engine_id": _engine_name}
_CHOICES = {
    "engine_core": ENGINE_CORES,
    "standby": STANDBY_STATES,
    "tool_call_parser": ("", *TOOL_CALL_PARSERS, NONE),
    "reasoning_parser": ("", *REASONING_PARSERS, NONE),
}
_MAY_BE_ZERO = {"finish_timeout_s", "min_serve_s", "switch_finish_s"}


def _check(given: Mapping[str, Any]) -> None:
    """Check variables as argparse checks options, and that every number is above 0."""
    for name, value in given.items():
        if isinstance(value, int | float):
            fits, wanted = (value >= 0, "0 or more") if name in _MAY_BE_ZERO else (value > 0, "above 0")
            if not fits or value == math.inf:
                raise out_of_range(WORKER, name, value, f"a number {wanted}")
        if name == "partitions" and value > MAX_PARTITIONS:
            raise out_of_range(WORKER, name, value, f"a number from 1 to {MAX_PARTITIONS}")
        choices = _CHOICES.get(name)
        if choices is not None and value not in choices:
            raise out_of_range(WORKER, name, value, " or ".join(choices))
        if name in _CHECKED_TEXTS and value:
            try:
                _CHECKED_TEXTS[name](value)
            except argparse.ArgumentTypeError as error:
                raise VariableError(variable_of(WORKER, name), str(error)) from error


@dataclass(frozen=True)
class ProcessSettings:
    """All settings of an engine process."""

    worker: WorkerSettings
    engine: EngineConfig
    streams: StreamsSettings
    telemetry: TelemetrySettings
    degradation: DegradationSettings = field(default_factory=DegradationSettings)


def logging_settings(options: argparse.Namespace, environ: Mapping[str, str]) -> TelemetrySettings:
    """Return the settings of logs and telemetry: parsed options, then variables.

    Raises:
        VariableError: a variable is unknown, malformed or out of range.
    """
    flags = {field.name: getattr(options, field.name, None) for field in dataclasses.fields(TelemetrySettings)}
    return telemetry_settings(environ, flags)


def load_settings(arguments: Sequence[str] | None, environ: Mapping[str, str]) -> ProcessSettings:
    """Read the command line and the environment.

    Raises:
        EngineError: an engine option is out of range.
        ValueError: another option or a variable is unknown, malformed or missing; the message names it.
    """
    options = build_parser().parse_args(arguments)
    # Misspelt variables are reported before missing ones, which they may have caused.
    telemetry, streams = logging_settings(options, environ), settings_from_environment(environ)
    engine = engine_config(options, environ)
    degradation = degradation_settings(environ)
    worker = worker_settings(options, environ)
    if worker.standby and engine.parallel.nnodes > 1:
        expected = "nothing with --nnodes above 1, since a spare and its engine would wait for the same machines"
        raise ValueError(f"--standby: {worker.standby!r} was given, {expected} is expected")
    if worker.changes_models and engine.parallel.nnodes > 1:
        raise ValueError("--models and --enable-sleep-mode go with one machine: with --nnodes the model stays")
    return ProcessSettings(worker, engine, streams, telemetry, degradation)
