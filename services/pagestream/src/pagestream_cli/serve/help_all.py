"""`pagestream serve --help-all`: every variable that the processes of a deployment read."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from pagestream_telemetry.environment import GROUPS, fields_of, variable_of

_WIDTH = 100
_RENAMED = {"redis_url": "redis"}
"""Fields whose variable has another name."""
NO_DEFAULT = "has to be given"
"""The default of a setting without one."""
_COMPUTED = {"served_model_name": "the folder's name", "engine_id": "host name and process id"}
"""What fields without a default are where nothing is given."""


class Setting(NamedTuple):
    """A field of a group."""

    variable: str
    default: str
    text: str


def print_settings() -> None:
    """Print each group with its settings: variable, default, and what it says."""
    for group, kinds in groups().items():
        sys.stdout.write(f"{group}: {GROUPS[group]}\n\n")
        for setting in settings_of(group, kinds):
            sys.stdout.write(f"  {setting.variable} ({setting.default})\n")
            indent = " " * 6
            sys.stdout.write(
                textwrap.fill(setting.text, _WIDTH, initial_indent=indent, subsequent_indent=indent) + "\n"
            )
        sys.stdout.write("\n")
    sys.stdout.write(
        "Flags of serve and of the processes win over variables; `pagestream-engine --help` lists its own.\n"
    )


def groups() -> dict[str, tuple[type, ...]]:
    """Return the settings classes of each group of gateways and engines."""
    from pagestream_engine.config import EngineConfig
    from pagestream_gateway.settings import OWN_GROUPS
    from pagestream_streams.settings import StreamsSettings
    from pagestream_telemetry.settings import TelemetrySettings
    from pagestream_worker.ladder.settings import DegradationSettings
    from pagestream_worker.settings import WorkerSettings

    gateway = {group.upper(): (kind,) for group, kind in OWN_GROUPS.items()}
    engine = tuple(group for name, group in fields_of(EngineConfig).items() if name != "place")
    common = {"BROKER": (StreamsSettings,), "TELEMETRY": (TelemetrySettings,)}
    process = {"WORKER": (WorkerSettings,), "ENGINE": engine, "DEGRADATION": (DegradationSettings,)}
    return {**gateway, **process, **common}


def settings_of(group: str, kinds: Iterable[type]) -> Iterator[Setting]:
    """Yield the settings of a group."""
    for kind in kinds:
        texts, defaults = _texts(kind), _defaults(kind)
        for name in fields_of(kind):
            variable = variable_of(group, _RENAMED.get(name, name))
            yield Setting(variable, defaults.get(name, _COMPUTED.get(name, NO_DEFAULT)), texts.get(name, ""))


def _defaults(kind: type) -> Mapping[str, str]:
    found: dict[str, str] = {}
    if dataclasses.is_dataclass(kind):
        for field in dataclasses.fields(kind):
            if field.default is not dataclasses.MISSING:
                found[field.name] = _shown(field.default)
            elif field.default_factory is not dataclasses.MISSING:
                found[field.name] = _shown(field.default_factory())
    return found


def _shown(value: Any) -> str:
    if value is None:
        return "unset"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str | Path):
        return str(value) or "empty"
    if isinstance(value, Mapping):
        return ",".join(f"{key}={each}" for key, each in value.items()) or "empty"
    return ",".join(value) or "empty" if isinstance(value, Sequence) else str(value)


def _texts(kind: type) -> dict[str, str]:
    """The string below each field in the class' source."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    found: dict[str, str] = {}
    body = definition.body if isinstance(definition, ast.ClassDef) else []
    for field, below in pairwise(body):
        match field, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                found[name] = " ".join(text.split())
    return found
