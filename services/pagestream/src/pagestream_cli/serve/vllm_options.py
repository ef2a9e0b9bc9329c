"""Options of `vllm serve` that say what options of ours say otherwise, or that variables say."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagestream_options.engine import ENGINE_OPTIONS
from pagestream_telemetry.environment import variable_of

from pagestream_cli.errors import UsageError
from pagestream_cli.serve.model import ADAPTER_FILE, REPOSITORY, AdapterChoice, find_demo_model, has_tokenizer_of

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
            hint="checkpoints of awq, gptq, compressed-tensors and fp8 need no option; int8 quantises while loading",
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
