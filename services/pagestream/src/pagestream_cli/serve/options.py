"""The options of `pagestream serve`, beside those of `vllm serve` that say the same otherwise or by variables."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pagestream_options.arguments import add_flags
from pagestream_options.declaration import Option
from pagestream_options.engine import ENGINE_OPTIONS
from pagestream_options.worker import WORKER_OPTIONS
from pagestream_telemetry.environment import variable_of

from pagestream_cli.datadir import DataDir
from pagestream_cli.errors import UsageError
from pagestream_cli.serve.model import ADAPTER_FILE, REPOSITORY, AdapterChoice, find_demo_model, has_tokenizer_of

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
    lora_modules: tuple[LoraModule, ...] = ()
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
        help=f"keys that open the API (default: ${KEY_VARIABLE}, or no keys)",
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
    add_variables(parser.add_argument_group("variables of the processes, by vLLM's names"))


def parse_options(arguments: argparse.Namespace) -> ServeOptions:
    """Return the parsed options. Files of gateways come from their variables where no flag names them.

    Raises:
        UsageError: options of vLLM's are malformed, contradict each other, or ask for what isn't here.
    """
    names = served_names(arguments.served_model_name)
    model = revised(arguments.model, arguments.revision)
    check_tokenizer(model, arguments.tokenizer)
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
        given_keys=keys(arguments, key_file),
        lora_modules=tuple(lora_module(text) for text in arguments.lora_modules or ()),
        environment=dict(variables(arguments)),
    )


def _file_of_gateways(field: str) -> Path | None:
    """Return the file that a gateway would take from its environment, since serve checks it and probes by TLS."""
    given = os.environ.get(variable_of("GATEWAY", field))
    return None if given is None else Path(given)


def _engine_arguments(arguments: argparse.Namespace) -> tuple[str, ...]:
    values = {flag: getattr(arguments, each.name) for flag, each in PASSED_ON.items()}
    merge_speculation(values, arguments.speculative_config)
    drop_own_quantization(values, arguments.model)
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


_ONE_RANK = ("draft_tensor_parallel_size", 1)
KEY_VARIABLE = "VLLM_API_KEY"


@dataclass(frozen=True)
class LoraModule:
    """A LoRA adapter and its served name."""

    name: str
    path: str

    def chosen(self) -> AdapterChoice:
        """Return the adapter as serve loads it."""
        return AdapterChoice(Path(self.path).expanduser().absolute(), self.name)


def add_variables(group: argparse._ArgumentGroup) -> None:
    """Add options that set variables of gateways and engines."""
    group.add_argument("--ssl-ca-certs", metavar="FILE", help="authorities of clients' certificates (PEM)")
    group.add_argument("--ssl-cert-reqs", metavar="0|1", help="1: clients may show a certificate")
    group.add_argument("--allowed-origins", metavar="JSON", help="web pages that may call the API from a browser")
    group.add_argument("--sse-keep-alive-interval", metavar="S", help="seconds of silence before an empty line is sent")
    group.add_argument("--download-dir", metavar="DIR", help="Hugging Face's cache")
    group.add_argument("--hf-token", nargs="?", const="", metavar="TOKEN", help="token for Hugging Face")
    group.add_argument("--otlp-traces-endpoint", metavar="URL", help="export metrics and spans there, by OTLP/gRPC")


def served_names(given: list[str] | None) -> list[str]:
    """Return the model's names, each once.

    Raises:
        UsageError: a further name has a comma, which parts them in a variable.
    """
    names = list(dict.fromkeys(given or []))
    for name in names[1:]:
        if "," in name or not name:
            raise UsageError(f"--served-model-name {name!r}: a further name without a comma is expected")
    return names


def revised(model: str | None, revision: str | None) -> str | None:
    """Return a repository's name with its revision.

    Raises:
        UsageError: the model is no repository, or names a revision itself.
    """
    if revision is None:
        return model
    if model is None or Path(model).exists() or "@" in model or REPOSITORY.fullmatch(model) is None:
        given = model or "the demo model"
        raise UsageError(f"--revision {revision}: {given} is no Hugging Face repository without a revision")
    return f"{model}@{revision}"


def check_tokenizer(model: str | None, tokenizer: str | None) -> None:
    """Raise UsageError for a tokenizer that is not the model's."""
    names = (None, model, (model or "").partition("@")[0])
    if tokenizer not in names and not has_tokenizer_of(model, str(tokenizer)):
        raise UsageError(
            f"--tokenizer {tokenizer} isn't the model's",
            hint="a model has the tokenizer of its folder: copy tokenizer.json there",
        )


def keys(arguments: argparse.Namespace, file: Path | None) -> tuple[str, ...]:
    """Return the keys that were given, else that of vLLM's variable where no file of keys is named."""
    if arguments.api_key and arguments.api_keys:
        raise UsageError(
            "--api-key and --api-keys exclude each other", hint="add keys to the file: `pagestream keys new`"
        )
    if arguments.api_key is None:
        key = os.environ.get(KEY_VARIABLE, "")
        return (key,) if key and file is None else ()
    if not all(key.strip() for key in arguments.api_key):
        raise UsageError("--api-key: an empty key was given")
    return tuple(arguments.api_key)


def lora_module(text: str) -> LoraModule:
    """Read `NAME=FOLDER`, or JSON with `name` and `path`."""
    name, _, path = text.partition("=")
    if text.lstrip().startswith("{"):
        given = _json("--lora-modules", text)
        name, path = str(given.get("name", "")), str(given.get("path", ""))
    if not name or not path:
        raise UsageError(f"--lora-modules {text}: NAME=FOLDER is expected, or JSON with name and path")
    module = LoraModule(name, path)
    if not (module.chosen().folder / ADAPTER_FILE).is_file():
        raise UsageError(f"--lora-modules {text}: {path} has no {ADAPTER_FILE}")
    return module


def variables(arguments: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """Yield the variables that flags stand for."""
    if arguments.ssl_cert_reqs not in (None, "0", "1"):
        raise UsageError(
            f"--ssl-cert-reqs {arguments.ssl_cert_reqs}: 0 or 1 is expected",
            hint="serve itself asks its gateways without a certificate; gateways of a chart can require one",
        )
    if arguments.ssl_ca_certs is not None and arguments.ssl_cert_reqs == "1":
        yield variable_of("GATEWAY", "tls_client_ca"), str(Path(arguments.ssl_ca_certs).absolute())
        yield variable_of("GATEWAY", "tls_client_certificates"), "optional"
    if arguments.allowed_origins is not None:
        yield variable_of("GATEWAY", "cors_origins"), ",".join(_origins(arguments.allowed_origins))
    if arguments.sse_keep_alive_interval not in (None, "0"):
        yield variable_of("STREAM", "keep_alive_s"), arguments.sse_keep_alive_interval
    if arguments.download_dir is not None:
        yield "HF_HUB_CACHE", str(Path(arguments.download_dir).expanduser().absolute())
    if arguments.hf_token:
        yield "HF_TOKEN", arguments.hf_token
    if arguments.otlp_traces_endpoint is not None:
        yield variable_of("TELEMETRY", "otlp_endpoint"), arguments.otlp_traces_endpoint


def _origins(text: str) -> list[str]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise UsageError(f"--allowed-origins {text}: a JSON list of origins is expected")
    return found


def _json(flag: str, text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise UsageError(f"{flag} {text}: a JSON object is expected")
    return found


def drop_own_quantization(values: dict[str, Any], model: str | None) -> None:
    """Leave out a method that is the checkpoint's own.

    Raises:
        UsageError: the checkpoint has another, or the method isn't here.
    """
    from pagestream_engine.errors import ConfigError
    from pagestream_engine.offline.options import is_of_checkpoint

    method = values["--quantization"]
    if method is None or ENGINE_OPTIONS["quantization"].accepts(method):
        return
    try:
        is_own = is_of_checkpoint(model or find_demo_model(), method)
    except ConfigError as error:
        raise UsageError(f"--{error}") from error
    if not is_own:
        raise UsageError(
            f"--quantization {method} isn't here",
            hint="quantised checkpoints need no option, but vLLM's names of their methods may be given; int8 quantises "
            "while loading",
        )
    values["--quantization"] = None


def merge_speculation(values: dict[str, Any], config: str | None) -> None:
    """Add the members of vLLM's `--speculative-config`.

    Raises:
        UsageError: one isn't here, or contradicts an option.
    """
    if config is None:
        return
    from pagestream_engine.offline.options import SPECULATION

    methods = ENGINE_OPTIONS["speculative_method"]
    for name, value in _json("--speculative-config", config).items():
        if value is None or (name, value) == _ONE_RANK:
            continue
        if name not in SPECULATION:
            expected = ", ".join(SPECULATION)
            raise UsageError(f"vLLM's --speculative-config with {name} isn't here", hint=f"{expected} are taken")
        if name == "method" and not methods.accepts(value):
            taken = " or ".join(methods.choices or ())
            raise UsageError(f"vLLM's --speculative-config with method {value} isn't here", hint=f"{taken} is")
        flag = f"--{SPECULATION[name].replace('_', '-')}"
        if values[flag] not in (None, str(value)):
            raise UsageError(f"{flag} {values[flag]} and {name} {value} of --speculative-config contradict each other")
        values[flag] = str(value)
