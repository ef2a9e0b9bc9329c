"""The options of `pagestream serve`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pagestream_options.arguments import add_flags
from pagestream_options.declaration import Option
from pagestream_options.engine import ENGINE_OPTIONS
from pagestream_options.worker import WORKER_OPTIONS
from pagestream_telemetry.environment import variable_of

from pagestream_cli.datadir import DataDir
from pagestream_cli.serve import vllm_options

PASSED_ON: Mapping[str, Option] = {
    each.flag: each
    for each in (*ENGINE_OPTIONS.values(), *WORKER_OPTIONS.values())
    if each.help and (each.is_served if each.name in WORKER_OPTIONS else not each.elsewhere)
}
"""By their flags the options that are passed to every engine, which checks them."""
_DEMO_ENGINES, _DEMO_GATEWAYS = 2, 3
"""Least numbers with --demo. A browser has at most six connections to a gateway, and the page reads eight streams, also
while a gateway is dead."""
_BLOCKS_FLAG, _DEMO_BLOCKS = "--num-gpu-blocks-override", "512"
"""KV blocks of each engine with --demo and the demo model. Eight streams of 600 tokens take 300 of one engine: the
page's picture has a cell for each, and shows how they fill, are shared, and are evicted.
"""


@dataclass(frozen=True)
class ServeOptions:
    """What to serve, and where."""

    model: str | None
    """A model folder; None is the demo model."""
    served_model_name: str | None
    """Model name of the API; None: the folder's name, or `demo`."""
    host: str
    """Address on which gateways listen."""
    http_port: int
    """Port of the first gateway; the others have the ports after it. 0: any free ones."""
    grpc_port: int
    """Likewise, for gRPC."""
    metrics_port: int | None
    """Metrics port of the first process; gateways, then engines have the ports after it. None: no metrics endpoints."""
    metrics_host: str
    """Address of all metrics ports, which ask for no key."""
    redis_url: str | None
    """A Redis that runs already; None: serve starts its own."""
    engines: int
    warm_spares: int
    """Engines beside them that stand by, and take the place of one that dies."""
    gateways: int
    data_dir: DataDir
    api_keys: Path | None
    """File of key hashes and tenants, for the gateways; None: no API key is required, but for `given_keys`."""
    tls_certificate: Path | None
    """PEM file of a certificate chain with which gateways serve TLS; None: no TLS."""
    tls_key: Path | None
    """PEM file of its private key."""
    engine_arguments: tuple[str, ...]
    """Options for the command line of every engine."""
    greet: str | None
    """A first prompt, whose answer is shown; None: none."""
    exit_after_greet: bool
    demo: bool
    """Whether the page at `/` may kill processes: see _DEMO_ENGINES."""
    help_all: bool
    """Print every setting, and serve nothing."""
    verbose: bool
    """Show the whole output of the parts."""
    aliases: tuple[str, ...] = ()
    """Further names that requests may use for the model."""
    given_keys: tuple[str, ...] = ()
    """API keys of the tenant "default", in the place of a file."""
    lora_modules: tuple[vllm_options.LoraModule, ...] = ()
    """Adapters that requests may name from the start."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of gateways and engines that flags stand for."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of serve."""
    parser.usage = "%(prog)s [MODEL] [options]"
    parser.epilog = (
        "Command lines of `vllm serve` are taken too, with `--config FILE`; docs/coming-from.md lists its flags."
    )
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="folder of a model or LoRA adapter, or a Hugging Face repository (default: the demo model)",
    )
    parser.add_argument(
        "--served-model-name",
        nargs="+",
        metavar="NAME",
        help="model's or adapter's name in the API (default: the folder's); of several, answers have the first",
    )
    parser.add_argument("--revision", metavar="NAME", help="branch, tag or commit of a repository, as MODEL@NAME")
    parser.add_argument("--tokenizer", metavar="MODEL", help=argparse.SUPPRESS)
    parser.add_argument("--host", default="127.0.0.1", help="where gateways listen (default: %(default)s)")
    parser.add_argument(
        "--http-port",
        "--port",
        type=int,
        default=8000,
        metavar="PORT",
        help="port of the first gateway; the others follow; 0: any (default: %(default)s)",
    )
    parser.add_argument(
        "--grpc-port", type=int, default=50051, metavar="PORT", help="likewise, for gRPC (default: %(default)s)"
    )
    parser.add_argument(
        "--metrics-port",
        type=int,
        metavar="PORT",
        help="Prometheus metrics of gateways, then engines, from this port on",
    )
    parser.add_argument(
        "--metrics-host",
        default="127.0.0.1",
        help="where those ports listen; no key is asked for (default: %(default)s)",
    )
    parser.add_argument("--redis", metavar="URL", dest="redis_url", help="use this Redis instead of starting one")
    parser.add_argument(
        "--engines", type=_at_least_one, default=1, metavar="N", help="engine processes (default: %(default)s)"
    )
    parser.add_argument(
        "--warm-spares",
        type=_none_or_more,
        default=0,
        metavar="N",
        help="further engine processes, each of which takes the place of one that dies (default: %(default)s)",
    )
    parser.add_argument(
        "--gateways", type=_at_least_one, default=1, metavar="N", help="gateway processes (default: %(default)s)"
    )
    parser.add_argument(
        "--data-dir", metavar="DIR", help="queue, logs and serve.json (default: ~/.local/share/pagestream)"
    )
    parser.add_argument("--api-keys", type=Path, metavar="FILE", help="key hashes and tenants (default: no keys)")
    parser.add_argument(
        "--api-key",
        nargs="+",
        metavar="KEY",
        help=f"keys that open the API (default: ${vllm_options.KEY_VARIABLE}, or no keys)",
    )
    parser.add_argument("--tls-certificate", type=Path, metavar="FILE", help="serve TLS with this chain (PEM)")
    parser.add_argument("--tls-key", type=Path, metavar="FILE", help="its private key (PEM)")
    parser.add_argument("--greet", metavar="PROMPT", help="send this prompt when ready, and show the answer")
    parser.add_argument("--exit-after-greet", action="store_true", help="shut down after that answer")
    parser.add_argument(
        "--demo", action="store_true", help="let the page at / kill engines, gateways and Redis (loopback alone)"
    )
    parser.add_argument("--help-all", action="store_true", help="list every setting of every process, with its default")
    parser.add_argument("--verbose", "-v", action="store_true", help="show the whole output of the parts")
    engine = parser.add_argument_group("engine options, passed to every engine")
    add_flags(engine, PASSED_ON.values(), is_passed_on=True)
    engine.add_argument("--speculative-config", metavar="JSON", help="the three above in one, as vLLM takes them")
    engine.add_argument(
        "--lora-modules", nargs="+", metavar="NAME=FOLDER", help="adapters that requests may name from the start"
    )
    vllm_options.add_variables(parser.add_argument_group("variables of the processes, by vLLM's names"))


def parse_options(arguments: argparse.Namespace) -> ServeOptions:
    """Return the parsed options. Files of gateways come from their variables where no flag names them.

    Raises:
        UsageError: options of vLLM's are malformed, contradict each other, or ask for what isn't here.
    """
    names = vllm_options.served_names(arguments.served_model_name)
    model = vllm_options.revised(arguments.model, arguments.revision)
    vllm_options.check_tokenizer(model, arguments.tokenizer)
    key_file = arguments.api_keys or (None if arguments.api_key else _file_of_gateways("api_keys"))
    return ServeOptions(
        model=model,
        served_model_name=names[0] if names else None,
        aliases=tuple(names[1:]),
        host=arguments.host,
        http_port=arguments.http_port,
        grpc_port=arguments.grpc_port,
        metrics_port=arguments.metrics_port,
        metrics_host=arguments.metrics_host,
        redis_url=arguments.redis_url,
        engines=max(arguments.engines, _DEMO_ENGINES if arguments.demo else 1),
        warm_spares=arguments.warm_spares,
        gateways=max(arguments.gateways, _DEMO_GATEWAYS if arguments.demo else 1),
        data_dir=DataDir.at(arguments.data_dir),
        api_keys=key_file,
        tls_certificate=arguments.tls_certificate or _file_of_gateways("tls_certificate"),
        tls_key=arguments.tls_key or _file_of_gateways("tls_key"),
        engine_arguments=_engine_arguments(arguments),
        greet=arguments.greet,
        exit_after_greet=arguments.exit_after_greet,
        demo=arguments.demo,
        help_all=arguments.help_all,
        verbose=arguments.verbose,
        given_keys=vllm_options.keys(arguments, key_file),
        lora_modules=tuple(vllm_options.lora_module(text) for text in arguments.lora_modules or ()),
        environment=dict(vllm_options.variables(arguments)),
    )


def _file_of_gateways(field: str) -> Path | None:
    """Return the file that a gateway would take from its environment, since serve checks it and probes by TLS."""
    given = os.environ.get(variable_of("GATEWAY", field))
    return None if given is None else Path(given)


def _engine_arguments(arguments: argparse.Namespace) -> tuple[str, ...]:
    values = {flag: getattr(arguments, each.name) for flag, each in PASSED_ON.items()}
    vllm_options.merge_speculation(values, arguments.speculative_config)
    vllm_options.drop_own_quantization(values, arguments.model)
    if arguments.demo and arguments.model is None and values[_BLOCKS_FLAG] is None:
        values[_BLOCKS_FLAG] = _DEMO_BLOCKS
    if arguments.lora_modules and values["--enable-lora"] is None:
        values["--enable-lora"] = True
    given: list[str] = []
    switches: list[str] = []
    for flag, value in values.items():
        if isinstance(value, bool):
            switches.append(flag if value else f"--no-{flag.removeprefix('--')}")
        elif value is not None:
            given += [flag, value]
    return (*given, *switches)


def _at_least_one(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} was given, a number of at least 1 is expected")
    return value


def _none_or_more(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} was given, a number of at least 0 is expected")
    return value
