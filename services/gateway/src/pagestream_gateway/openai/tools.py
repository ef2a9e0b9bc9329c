"""OpenAI's tools in the bodies of chats."""

import json
from collections.abc import Collection, Container, Iterator, Sequence
from typing import Annotated, Any, Literal

from pagestream.v1.inference_pb2 import SamplingParams
from pydantic import Field

from pagestream_gateway.errors import InvalidRequest, UnsupportedField
from pagestream_gateway.http.body import (
    MAX_DEPTH,
    Body,
    Items,
    current_warnings,
    expects,
    is_deeper,
    parse_body,
    within,
)
from pagestream_gateway.request import Tools

_MOST_TOOLS = 1024  # OpenAI takes 128; those who gather them from many servers have more
Effort = Annotated[
    Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"],
    expects('must be "none", "minimal", "low", "medium", "high", "xhigh" or "max"'),
]
"""How much reasoning is asked for: "none" switches it off where the model's template can; the others are for templates
that know `reasoning_effort`."""
ToolName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]


class Function(Body):
    """A function that the model may call; arguments are held to the schema where a call is forced."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="A JSON schema of the arguments; none: any object.")
    strict: bool | None = None


class Tool(Body):
    """A tool."""

    type: Literal["function"] = "function"
    function: Function
    cache_control: Annotated[Any, Field(exclude=True)] = None


class FunctionName(Body):
    """The function to call."""

    name: str


class NamedTool(Body):
    """The tool to call."""

    type: Literal["function"]
    function: FunctionName


class AllowedTools(Body):
    """The tools that may be called, of those that the body has: the model is shown no other."""

    mode: Literal["auto", "required"]
    tools: Items[dict[str, Any]]

    def names(self) -> list[str]:
        """Return the names of the functions among them. Raises InvalidRequest."""
        found = []
        with within("tool_choice"):
            for number, tool in caller_run(self.tools, ("function",)):
                function = tool.get("function")
                name = (function if isinstance(function, dict) else tool).get("name")
                if not isinstance(name, str):
                    raise InvalidRequest(f"tools.{number}.name", "is needed")
                found.append(name)
        return found


class AllowedToolsChoice(Body):
    """The same as chats spell it."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoice = Annotated[
    Literal["none", "auto", "required"] | NamedTool | AllowedToolsChoice,
    expects(
        'must be "none", "auto", "required", {"type": "function", "function": {"name": ...}} or {"type": '
        '"allowed_tools", "allowed_tools": {"mode": ..., "tools": [...]}}'
    ),
]
CHOICES = ("function", "allowed_tools")
"""Types of a tool_choice that is an object."""


class CalledFunction(Body):
    """A function that was called, with its arguments as JSON text."""

    name: str
    arguments: str
    parsed_arguments: Any = None
    """Ignored: of the official clients' `parse`, the arguments as an object."""


class ToolCall(Body):
    """A call of an earlier answer."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: Any = None
    """Ignored: of the delta that the call came in."""

    def for_template(self) -> dict[str, Any]:
        """Return the call; `shaped` makes an object of its arguments where the template takes one.

        What is no JSON object, as of an answer that was cut off, or is deeper than a body may be, becomes an empty one:
        a template could fail on it, in each later turn of the conversation.
        """
        arguments: Any = self.function.arguments
        try:
            given = json.loads(arguments)
            is_object = isinstance(given, dict) and not is_deeper(given, MAX_DEPTH)
        except (ValueError, RecursionError):
            is_object = False
        function = {"name": self.function.name, "arguments": arguments if is_object else {}}
        return {"id": self.id, "type": "function", "function": function}


def caller_run(
    tools: Sequence[dict[str, Any]], kinds: Container[object], needed: Collection[str] = ()
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the tools that the caller runs, of these kinds, each with its place in the list.

    The server runs none itself, such as a search of the web: agents offer those whatever server they talk to. They are
    left out with a warning, unless `needed`, kinds and names from `tool_choice`, has one. Raises InvalidRequest.
    """
    for number, tool in enumerate(tools):
        kind = tool.get("type")
        if kind in kinds:
            yield number, tool
            continue
        if not isinstance(kind, str):
            raise InvalidRequest(f"tools.{number}.type", "is needed" if kind is None else "must be a string")
        if kind in needed or tool.get("name", kind) in needed:
            raise UnsupportedField(f"tools.{number}.type", f"tool_choice needs it, and the server {_runs_no(kind)}")
        current_warnings().add(f"tools.{number}", f"was left out: the server {_runs_no(kind)}")


def _runs_no(kind: str) -> str:
    return f"runs no tools of type {kind[:64]!r}; the caller runs functions"


def check_kind(choice: object, kinds: Container[object]) -> None:
    """Refuse a tool_choice of a tool that the server would have to run. Raises UnsupportedField."""
    kind = choice.get("type") if isinstance(choice, dict) else None
    if isinstance(kind, str) and kind not in kinds:
        raise UnsupportedField("tool_choice", f"the server {_runs_no(kind)}")


def tools_of(
    tools: Sequence[Tool] | None,
    choice: Literal["none", "auto", "required"] | NamedTool | AllowedTools | None,
    parallel: bool | None,
) -> Tools:
    """Return what a chat may do with tools: none of them are shown to the model for "none". Raises InvalidRequest."""
    if isinstance(choice, AllowedTools):
        tools, choice = _allowed(tools or (), choice.names()), choice.mode
    if not tools:
        if choice not in (None, "none", "auto"):
            raise InvalidRequest("tool_choice", "needs tools")
        return Tools()
    if len(tools) > _MOST_TOOLS:
        raise InvalidRequest("tools", f"at most {_MOST_TOOLS} tools, got {len(tools)}")
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        raise InvalidRequest("tools", "two tools have the same name")
    if choice == "none":
        return Tools()
    forced = choice.function.name if isinstance(choice, NamedTool) else ""
    if forced and forced not in names:
        raise InvalidRequest("tool_choice", f"{forced[:64]!r} is not among the tools")
    return Tools(
        definitions=[tool.model_dump(exclude_none=True) for tool in tools],
        is_forced=bool(forced) or choice == "required",
        forced_name=forced,
        one_call=parallel is False,
    )


def _allowed(tools: Sequence[Tool], names: Collection[str]) -> list[Tool]:
    known = [tool.function.name for tool in tools]
    if (missing := next((name for name in names if name not in known), None)) is not None:
        raise InvalidRequest("tool_choice", f"{missing[:64]!r} is not among the tools")
    return [tool for tool in tools if tool.function.name in names]


def chat_tools(tools: object, choice: object) -> list[Tool] | None:
    """Return the functions of a chat's body; None for what is no list of objects. Raises InvalidRequest."""
    check_kind(choice, CHOICES)
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        return None
    found = []
    for number, tool in caller_run([{"type": "function", **tool} for tool in tools], ("function",)):
        with within(f"tools.{number}"):
            found.append(parse_body(Tool, tool))
    return found


def force_calls(sampling: SamplingParams, tools: Tools, *, given: object) -> None:
    """Hold an output to the calls that `tools` forces. Raises UnsupportedField for what would keep them from it.

    `given`: what the body says of the whole output. A form of the answer says nothing of calls, and is not in the way.
    """
    if sampling.stop:
        raise UnsupportedField("stop", "with a forced tool call, which it could cut")
    if given is not None:
        raise UnsupportedField("structured_outputs", "with a forced tool call, which has a form of its own")
    sampling.structured_outputs.CopyFrom(tools.constraint())
