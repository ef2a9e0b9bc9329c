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

from pagestream_options.declaration import declared
from pagestream_options.engine import GROUPS as ENGINE_GROUPS
from pagestream_options.worker import WorkerOptions
from pagestream_telemetry.environment import GROUPS, fields_of, variable_of

_WIDTH = 100
NO_DEFAULT = "has to be given"
"""The default of a setting without one."""


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
    from pagestream_gateway.settings import OWN_GROUPS
    from pagestream_streams.settings import StreamsSettings
    from pagestream_telemetry.settings import TelemetrySettings
    from pagestream_worker.load_shedding import DegradationSettings

    gateway = {group.upper(): (kind,) for group, kind in OWN_GROUPS.items()}
    common = {"BROKER": (StreamsSettings,), "TELEMETRY": (TelemetrySettings,)}
    process = {
        "WORKER": (WorkerOptions,),
        "ENGINE": tuple(ENGINE_GROUPS.values()),
        "DEGRADATION": (DegradationSettings,),
    }
    return {**gateway, **process, **common}


def settings_of(group: str, kinds: Iterable[type]) -> Iterator[Setting]:
    """Yield the settings of a group."""
    for kind in kinds:
        if options := declared(kind):
            for each in options.values():
                default = each.shown_default or (_shown(each.default) if each.has_default else NO_DEFAULT)
                yield Setting(variable_of(group, each.key), default, each.text)
            continue
        texts, defaults = _texts(kind), _defaults(kind)
        for name in fields_of(kind):
            yield Setting(variable_of(group, name), defaults.get(name, NO_DEFAULT), texts.get(name, ""))


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
