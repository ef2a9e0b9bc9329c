"""Settings of a worker process, read from its command line."""

import argparse
import socket
from dataclasses import dataclass
from os import getpid
from pathlib import Path
from typing import Any

from pagestream_engine.config import ATTENTION_BACKENDS, DEVICES, DTYPES, EngineConfig


@dataclass(frozen=True)
class WorkerSettings:
    """What a worker is, where it finds its queue, and how patient it is."""

    model: str
    redis_url: str
    served_model_name: str
    engine_id: str
    """Name in leases and logs; a boot nonce is added to it."""
    partitions: int = 4
    """Partitions of a model that nobody has published before; a published number stays."""
    metrics_port: int | None = None
    """TCP port of the Prometheus endpoint; None: no endpoint."""
    idle_poll_s: float = 0.1
    """Seconds between looks at the queue when no doorbell rings: bounds what a lost doorbell costs."""
    drain_timeout_s: float = 8.0
    """Seconds for the last appends and the hand-back after SIGTERM; pods are killed after ten."""
    exit_timeout_s: float = 9.5
    """Seconds from the end of serving to the end of the process, whatever still hangs."""
    stall_timeout_s: float = 120.0
    """Seconds that one step may take before the watchdog ends the process, so that its requests go on elsewhere."""
    retry_delay_s: float = 0.1
    """Seconds between tries of an append while Redis is away."""
    append_limit: int = 256
    """Most entries of one request in one append: a long backlog after an outage must not block Redis."""


_ENGINE_OPTIONS = (
    "dtype",
    "device",
    "attention_backend",
    "deterministic",
    "max_model_len",
    "seed",
    "max_logprobs",
    "block_size",
    "num_gpu_blocks_override",
    "gpu_memory_utilization",
    "enable_prefix_caching",
    "max_num_seqs",
    "max_num_batched_tokens",
    "scheduling_policy",
)


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Add the engine's options under vLLM's names; an option that is not given keeps the engine's default."""
    group = parser.add_argument_group("engine", "defaults are the engine's own", argument_default=argparse.SUPPRESS)
    group.add_argument("--dtype", choices=DTYPES, help="of weights, activations and KV cache")
    group.add_argument("--device", choices=DEVICES)
    group.add_argument("--attention-backend", choices=ATTENTION_BACKENDS)
    group.add_argument(
        "--deterministic",
        action=argparse.BooleanOptionalAction,
        help="bit-identical logits in any batch (default: on a CPU where that is nearly free)",
    )
    group.add_argument("--max-model-len", type=int, metavar="TOKENS", help="of prompt and output together")
    group.add_argument("--seed", type=int, help="of the generator that draws seeds where a request brings none")
    group.add_argument("--max-logprobs", type=int, metavar="N", help="that a request may ask for; -1 is no limit")
    group.add_argument("--block-size", type=int, metavar="TOKENS", help="in a KV block")
    group.add_argument("--num-gpu-blocks-override", type=int, metavar="N", help="KV blocks, instead of what fits")
    group.add_argument("--gpu-memory-utilization", type=float, metavar="SHARE")
    group.add_argument("--enable-prefix-caching", action=argparse.BooleanOptionalAction)
    group.add_argument("--max-num-seqs", type=int, metavar="N", help="sequences that run at once")
    group.add_argument("--max-num-batched-tokens", type=int, metavar="TOKENS", help="in one step")
    group.add_argument("--scheduling-policy", metavar="NAME")


def engine_config(options: argparse.Namespace) -> EngineConfig:
    """Build the engine's settings from parsed options. Raises ConfigError that names the option."""
    given: dict[str, Any] = {name: getattr(options, name) for name in _ENGINE_OPTIONS if hasattr(options, name)}
    return EngineConfig.from_options(given)


def _engine_name(text: str) -> str:
    if not text or ":" in text or any(character.isspace() for character in text):
        raise argparse.ArgumentTypeError(f"{text!r} was given, a name without spaces and colons is expected")
    return text


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} was given, a whole number of at least 1 is expected")
    return int(text)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of `pagestream-engine`."""
    parser = argparse.ArgumentParser(prog="pagestream-engine", description="Runs a model on requests from Redis.")
    parser.add_argument("model", metavar="MODEL", help="folder with config.json, safetensors, tokenizer.json")
    parser.add_argument("--redis", required=True, metavar="URL", help="such as redis://127.0.0.1:6379/0")
    parser.add_argument("--served-model-name", metavar="NAME", help="what clients ask for (default: the folder's name)")
    parser.add_argument("--engine-id", type=_engine_name, metavar="ID", help="default: host name and process id")
    parser.add_argument("--partitions", type=_count, default=4, metavar="N", help="of a model new to this Redis")
    parser.add_argument("--metrics-port", type=_count, metavar="PORT", help="serve Prometheus metrics at /metrics")
    add_engine_options(parser)
    return parser


def worker_settings(options: argparse.Namespace) -> WorkerSettings:
    """Build the worker's settings from parsed options."""
    return WorkerSettings(
        model=options.model,
        redis_url=options.redis,
        served_model_name=options.served_model_name or Path(options.model).resolve().name,
        engine_id=options.engine_id or f"{socket.gethostname()}-{getpid()}",
        partitions=options.partitions,
        metrics_port=options.metrics_port,
    )
