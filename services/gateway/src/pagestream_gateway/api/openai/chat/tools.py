"""OpenAI's tools in the bodies of chats."""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from pagestream_gateway.api.openai.strict_body import Body
from pagestream_gateway.core.output.tools import Tools
from pagestream_gateway.core.sampling.json_types import Items, expects
from pagestream_gateway.errors import InvalidRequest, UnsupportedField

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


ToolChoice = Annotated[
    Literal["none", "auto", "required"] | NamedTool,
    expects('must be "none", "auto", "required" or {"type": "function", "function": {"name": ...}}'),
]


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
        """Return the call as chat templates take it: with arguments as an object.

        What is none, as of an answer that was cut off, becomes an empty one: a template could fail on it, in each later
        turn of the conversation.
        """
        try:
            arguments: Any = json.loads(self.function.arguments or "{}")
        except (ValueError, RecursionError):
            arguments = {}
        if not isinstance(arguments, dict):
            arguments = {}
        return {"id": self.id, "type": "function", "function": {"name": self.function.name, "arguments": arguments}}


def tools_of(
    tools: Items[Tool] | None, choice: Literal["none", "auto", "required"] | NamedTool | None, parallel: bool | None
) -> Tools:
    """Return what a chat may do with tools: none of them are shown to the model for "none". Raises InvalidRequest."""
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


def check_forced(tools: Tools, stop: Sequence[str], *, given: object) -> None:
    """Refuse what would keep forced calls from being written. Raises UnsupportedField.

    `given`: what the body says of the whole output. A form of the answer says nothing of calls, and is not in the way.
    """
    if tools.is_forced and stop:
        raise UnsupportedField("stop", "with a forced tool call, which it could cut")
    if tools.is_forced and given is not None:
        raise UnsupportedField("structured_outputs", "with a forced tool call, which has a form of its own")
