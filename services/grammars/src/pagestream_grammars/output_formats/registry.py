"""The formats that are known, by their names, and which of them a model has.

The names are those of vLLM's parsers, `--tool-call-parser` and `--reasoning-parser`, as model cards and settings have
them. A name once given stays.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from typing import NamedTuple

from pagestream_grammars.output_formats import tool_calls
from pagestream_grammars.output_formats.declaration import ToolFormat
from pagestream_grammars.output_formats.reasoning import REASONING_PARSERS

NONE = "none"
"""The name of no format: outputs are content."""


def _declared() -> dict[str, ToolFormat]:
    """Return what each module of `tool_calls/` declares, the most special first."""
    names = sorted(each.name for each in iter_modules(tool_calls.__path__))
    formats = [import_module(f"{tool_calls.__name__}.{name}").FORMAT for name in names]
    return {each.name: each for each in sorted(formats, key=lambda each: each.generality)}


TOOL_FORMATS = _declared()
"""By the name that a request's record has."""
TOOL_CALL_PARSERS = dict(sorted((parser, each.name) for each in TOOL_FORMATS.values() for parser in each.parsers))
"""Names of parsers of tool calls, and of the format that a request's record has for each."""


class OutputParsers(NamedTuple):
    """Which parsers read a model's outputs; an empty name leaves it to the chat template."""

    tool_call_parser: str = ""
    reasoning_parser: str = ""

    def over(self, others: OutputParsers) -> OutputParsers:
        """Return these, and where one is not named the other's."""
        return OutputParsers(
            self.tool_call_parser or others.tool_call_parser, self.reasoning_parser or others.reasoning_parser
        )

    def fault(self) -> tuple[str, str] | None:
        """Return the member that has an unknown name, and what was expected; None where both are known."""
        for member, known in (("tool_call_parser", TOOL_CALL_PARSERS), ("reasoning_parser", REASONING_PARSERS)):
            name = getattr(self, member)
            if name and name != NONE and name not in known:
                return member, f"{name[:60]!r} was given, one of {', '.join([*known, NONE])} is expected"
        return None


BY_TEMPLATE = OutputParsers()
"""As the chat template says."""


def tool_format(template: str, parsers: OutputParsers = BY_TEMPLATE) -> str | None:
    """Return the format of tool calls, "" for none.

    None where no parser is named and the chat template takes no tools, or in a format that is not known here.
    """
    named = parsers.tool_call_parser
    if named == NONE:
        return ""
    if named in TOOL_CALL_PARSERS:
        return TOOL_CALL_PARSERS[named]
    if "tools" not in template:
        return None
    return next((each.name for each in TOOL_FORMATS.values() if each.is_taught(template)), None)
