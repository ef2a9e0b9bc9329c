"""Settings of an engine process: command line, then `PAGESTREAM_<GROUP>__<FIELD>`, then the defaults here."""

import argparse
import dataclasses
import json
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os import getpid
from pathlib import Path
from typing import Any

from pagestream_engine.config import ENGINE_OPTIONS, EngineConfig, EngineOptions
from pagestream_engine.errors import ConfigError
from pagestream_grammars.output_formats.registry import (
    BY_TEMPLATE,
    OutputParsers,
)
from pagestream_options.arguments import add_flags, given_flags
from pagestream_options.worker import STANDBY_STATES, WORKER_OPTIONS, WorkerOptions
from pagestream_streams import StreamsSettings, settings_from_environment
from pagestream_telemetry.environment import fields_of, out_of_range, read_environment, variable_of
from pagestream_telemetry.errors import VariableError
from pagestream_telemetry.settings import TelemetrySettings, telemetry_settings

from pagestream_worker.load_shedding import DegradationSettings, degradation_settings

WORKER, ENGINE = "WORKER", "ENGINE"
IMPORTED, LOADED = STANDBY_STATES
"""How far a spare starts: its modules are imported, or its model is loaded too."""


_OF_JINJA = ("{{", "{%", "{#", "\n")


class ChatTemplateError(ValueError):
    """A chat template can't be read, or is broken."""


@dataclass(frozen=True)
class ChatTemplateOptions:
    """What options say of a model's chat template."""

    text: str = ""
    """In place of the folder's; empty for that."""
    arguments: str = ""
    """Values that it gets where a request gives none, as a JSON object; empty for none."""


def given_template(given: str) -> str:
    """Return the text of a template, given as a file or, as in vLLM, as the text itself.

    Raises:
        ChatTemplateError: it is neither, or no template.
    """
    text = given
    if not any(mark in given for mark in _OF_JINJA):
        try:
            text = Path(given).expanduser().read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ChatTemplateError(f"{given!r:.200} was given, a file with a Jinja template is expected") from error
    from pagestream_grammars.templates import template_fault

    if (fault := template_fault(text)) is not None:
        raise ChatTemplateError(f"{given!r:.200} was given, which is no Jinja template: {fault}")
    return text


def given_arguments(given: str) -> str:
    """Return values for templates as they were given. Raises ChatTemplateError where they are no JSON object."""
    try:
        is_object = isinstance(json.loads(given), dict)
    except ValueError:
        is_object = False
    if not is_object:
        raise ChatTemplateError(
            f'{given!r:.200} was given, a JSON object like {{"enable_thinking": false}} is expected'
        )
    return given


@dataclass(frozen=True)
class WorkerSettings(WorkerOptions):
    """The group WORKER, as `pagestream_options.worker` declares it."""

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


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Add the engine's options, named as vLLM's; one that is not given keeps the engine's default."""
    group = parser.add_argument_group("engine", "defaults are the engine's own", argument_default=argparse.SUPPRESS)
    add_flags(group, ENGINE_OPTIONS.values())


def engine_config(options: argparse.Namespace, environ: Mapping[str, str] | None = None) -> EngineConfig:
    """Return the engine's settings: parsed options, then variables of the group ENGINE.

    Raises:
        ConfigError: an option is out of range.
        VariableError: a variable is unknown, malformed or out of range.
    """
    given = read_environment(environ or {}, {ENGINE: fields_of(EngineOptions)})[ENGINE]
    flags = given_flags(options, ENGINE_OPTIONS)
    try:
        return EngineConfig.from_options(given | flags)
    except ConfigError as error:
        if error.field in given and error.field not in flags:
            raise VariableError(variable_of(ENGINE, error.field), str(error)) from error
        raise


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
    add_flags(parser, WORKER_OPTIONS.values(), is_checked=True)
    parser.add_argument("--otlp-endpoint", metavar="URL", help="send metrics and spans there, by OTLP/gRPC")
    parser.add_argument("--log-level", metavar="LEVEL", help="lowest level written (default INFO)")
    add_engine_options(parser)
    return parser


_READ = {"chat_template": given_template, "default_chat_template_kwargs": given_arguments}
"""Fields that are given in other forms, or have to be checked, with what reads them."""


def worker_fields() -> dict[str, Any]:
    """Return the variables of the group WORKER with their types."""
    kinds = fields_of(WorkerOptions)
    return {each.key: kinds[name] for name, each in WORKER_OPTIONS.items()}


def worker_settings(options: argparse.Namespace, environ: Mapping[str, str] | None = None) -> WorkerSettings:
    """Return the worker's settings: parsed options, then variables of the group WORKER.

    Raises:
        VariableError: a variable is unknown, malformed or out of range.
        ValueError: the model or the Redis address is given nowhere.
    """
    given = read_environment(environ or {}, {WORKER: worker_fields()})[WORKER]
    variables = {name: given[each.key] for name, each in WORKER_OPTIONS.items() if each.key in given}
    for name, value in variables.items():
        each = WORKER_OPTIONS[name]
        if value not in ("", None) and not each.accepts(value):
            raise out_of_range(WORKER, each.key, value, each.wanted)
    flags = given_flags(options, WORKER_OPTIONS)
    values: dict[str, Any] = {**variables, **flags}
    for name, option in (("model", "MODEL"), ("redis_url", "--redis")):
        if not values.get(name):
            raise ValueError(f"{option} is needed; give it, or set {variable_of(WORKER, WORKER_OPTIONS[name].key)}")
    values["served_model_name"] = values.get("served_model_name") or Path(values["model"]).resolve().name
    values["engine_id"] = values.get("engine_id") or f"{socket.gethostname()}-{getpid()}"

    def place_of(name: str) -> str:
        return WORKER_OPTIONS[name].flag if name in flags else variable_of(WORKER, name)

    for name, read in _READ.items():
        if values.get(name):
            try:
                values[name] = read(values[name])
            except ChatTemplateError as error:
                raise ValueError(f"{place_of(name)}: {error}") from error
    parsers = OutputParsers(values.get("tool_call_parser", ""), values.get("reasoning_parser", ""))
    if (fault := parsers.fault()) is not None:
        raise ValueError(f"{place_of(fault[0])}: {fault[1]}")
    settings = WorkerSettings(**values)
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
