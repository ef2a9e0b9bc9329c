"""Write the pages of reference: docs/settings.md, docs/errors.md, docs/commands.md and docs/enginepool.md.

    python tools/write_reference.py [--check]

Settings, their defaults and texts come from the classes that read them; errors from the gateway's table; commands from
their parsers; fields of an EnginePool from its CustomResourceDefinition.
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from pagestream_cli.__main__ import build_parser
from pagestream_cli.client.endpoint import KEY_VARIABLES
from pagestream_cli.serve.help_all import groups, settings_of
from pagestream_gateway.configuration import _parser as gateway_parser
from pagestream_gateway.error_codes import ERROR_CODES, INTERNAL_ERROR, LOG_CODES
from pagestream_operator.settings import OperatorVariables
from pagestream_telemetry.environment import GROUPS
from pagestream_worker import build_parser as engine_parser

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
_WIDTH = 120
_WRITTEN = "Written by `python tools/write_reference.py`."


def settings() -> str:
    """Return docs/settings.md."""
    found: dict[str, tuple[type, ...]] = {**groups(), "OPERATOR": (OperatorVariables,)}
    lines = [
        "# Settings",
        "",
        *_wrapped(
            f"{_WRITTEN} Each process reads `PAGESTREAM_<GROUP>__<FIELD>` from its environment; a flag of the same "
            "name wins. A misspelt name ends the process at its start. In parentheses: the default. Mappings are "
            "written "
            '"name=2,other=1", lists "name,other". `pagestream serve --help-all` prints the settings of gateways and '
            "engines; the chart's values set those that it has no value for by `gateway.env`, `engine.env` or "
            "`operator.env`."
        ),
        "",
    ]
    for group, kinds in found.items():
        lines += [f"## {group}: {GROUPS[group]}", ""]
        for each in settings_of(group, kinds):
            lines += _item(f"- `{each.variable}` ({_plain(each.default)}): {_plain(each.text)}")
        lines.append("")
    lines += [f"## CLIENT: {GROUPS['CLIENT']}", ""]
    others = ", ".join(f"`{each}`" for each in KEY_VARIABLES[1:])
    lines += _item(f"- `{KEY_VARIABLES[0]}` (unset): The API key that commands send. Else that of {others} is sent.")
    return "\n".join(lines) + "\n"


def errors() -> str:
    """Return docs/errors.md."""
    lines = [
        "# Error codes",
        "",
        *_wrapped(
            f'{_WRITTEN} Over HTTP an error is `{{"error": {{"message", "type", "param", "code"}}}}`, in '
            "`/v1/messages` Anthropic's form; over gRPC the code, in upper case, is the reason of "
            "`google.rpc.ErrorInfo`. In parentheses: both statuses. `Retry-After` says when a retry may succeed; "
            "`x-should-retry: false` keeps clients of OpenAI and Anthropic from the retries that they make after 409, "
            "429 and 5xx: each 409, `quarantined`, and what alone exceeds a limit. Where a request was accepted, "
            "`X-Request-Id` names it."
        ),
        "",
    ]
    by_type: dict[str, dict[str, list[str]]] = {}
    for kind, code in ERROR_CODES.items():
        found = by_type.setdefault(code.type, {})
        found.setdefault(f"- `{code.code}` ({code.http_status}, {code.grpc_status.name}):", []).append(_summary(kind))
    by_type["server_error"][f"- `{INTERNAL_ERROR}` (500, INTERNAL):"] = ["The gateway failed; its log has the cause."]
    for name, codes in by_type.items():
        lines += [f"## {name}", ""]
        for code_text, meanings in codes.items():
            lines += _item(f"{code_text} {' Or: '.join(meanings)}")
        lines.append("")
    lines += [
        "## Codes with which an accepted request ends",
        "",
        *_wrapped(
            "They stand in the last event of a stream, in `GET /v1/requests/<id>`, and in the answer of a request that "
            "is not streamed."
        ),
        "",
        *(f"- `{code}`: {text}" for code, text in LOG_CODES.items()),
    ]
    return "\n".join(lines) + "\n"


def _summary(kind: type) -> str:
    text = " ".join((inspect.getdoc(kind) or "").split("\n\n")[0].split())
    return re.sub(r" \(decision \d+\)", "", re.split(r"(?<=\.) ", text)[0])


def commands() -> str:
    """Return docs/commands.md."""
    lines = [
        "# Commands",
        "",
        *_wrapped(
            f"{_WRITTEN} `pagestream help COMMAND` prints the same. Options have no abbreviations. `pagestream serve` "
            "also takes [the command lines of vLLM](coming-from.md)."
        ),
        "",
        *_command(build_parser(), "pagestream", 2),
        *_command(engine_parser(), "pagestream-engine", 2),
        *_command(gateway_parser(), "pagestream-gateway", 2),
    ]
    return "\n".join(lines).rstrip("\n") + "\n"


def _command(parser: argparse.ArgumentParser, name: str, level: int, text: str = "") -> Iterator[str]:
    """Yield a command's section, and those of its subcommands."""
    yield from (f"{'#' * min(level, 4)} {name}", "")
    text = " ".join((parser.description or text).split())
    if text:
        yield from (*_wrapped(_plain(f"{text[0].upper()}{text[1:].removesuffix('.')}.")), "")
    texts: dict[str, str] = {}
    inner: dict[str, argparse.ArgumentParser] = {}
    items: list[str] = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            inner = action.choices
            texts = {each.dest: each.help or "" for each in action._choices_actions}
        elif action.help != argparse.SUPPRESS and "--help" not in action.option_strings:
            items += _item(f"- `{_usage(action)}`: {_plain(_help(parser, action))}".removesuffix(": "))
    if items:
        yield from (*items, "")
    for verb, each in inner.items():
        yield from _command(each, f"{name} {verb}", level + 1, texts.get(verb, ""))


def _usage(action: argparse.Action) -> str:
    value = action.metavar or (
        "{" + ",".join(map(str, action.choices)) + "}" if action.choices else action.dest.upper()
    )
    value = " ".join(value) if isinstance(value, tuple) else value
    if action.nargs == 0:
        value = ""
    if action.nargs in ("?", "*"):
        value = f"[{value}]"
    if action.nargs in ("+", "*"):
        value += " ..."
    return " ".join(filter(None, (", ".join(action.option_strings), value)))


def _help(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    text = parser._get_formatter()._expand_help(action) if action.help else ""
    return " ".join(text.replace(str(Path.home()), "~").split())


def enginepool() -> str:
    """Return docs/enginepool.md."""
    definition = yaml.safe_load((ROOT / "helm/pagestream/crds/enginepools.yaml").read_text())["spec"]
    version = definition["versions"][0]
    fields = version["schema"]["openAPIV3Schema"]["properties"]
    lines = [
        "# EnginePool",
        "",
        *_wrapped(
            f"{_WRITTEN} An EnginePool (`{definition['group']}/{version['name']}`) is a set of engines that serve one "
            "model, or share out several. [operations](operations.md) installs one. In parentheses: type, and default."
        ),
        "",
        *("## spec", "", *_fields(fields["spec"], "")),
        *("", "## status", "", *_fields(fields["status"], "")),
    ]
    return "\n".join(lines) + "\n"


def _fields(schema: dict[str, Any], path: str) -> Iterator[str]:
    required = schema.get("required", ())
    for name, field in schema.get("properties", {}).items():
        facts = [field.get("type", "integer or string")]
        if name in required:
            facts.append("required")
        if field.get("default") not in (None, {}, ""):
            facts.append(f"default {_plain(str(field['default']))}")
        if "enum" in field:
            facts.append("one of " + ", ".join(map(str, field["enum"])))
        text = " ".join(field.get("description", "").split())
        yield from _item(f"- `{path}{name}` ({', '.join(facts)}): {_plain(text)}")
        yield from _fields(field, f"{path}{name}.")
        if isinstance(field.get("items"), dict):
            yield from _fields(field["items"], f"{path}{name}[].")


def _plain(text: str) -> str:
    """Keep Markdown from reading marks outside of code as its own."""
    parts = text.split("`")
    if len(parts) % 2 == 0:
        return re.sub(r"([*<`|])", r"\\\1", text)
    parts[::2] = [re.sub(r"([*<|])", r"\\\1", part) for part in parts[::2]]
    return "`".join(parts)


def _item(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, break_long_words=False, break_on_hyphens=False)


PAGES = {"settings.md": settings, "errors.md": errors, "commands.md": commands, "enginepool.md": enginepool}


def main() -> int:
    """Write the pages, or check them. Returns 1 where one is not what it would be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args()
    stale = [name for name, page in PAGES.items() if not (DOCS / name).is_file() or (DOCS / name).read_text() != page()]
    if options.check:
        print("\n".join(stale))
        return int(bool(stale))
    for name in stale:
        (DOCS / name).write_text(PAGES[name]())
    return 0


if __name__ == "__main__":
    sys.exit(main())
