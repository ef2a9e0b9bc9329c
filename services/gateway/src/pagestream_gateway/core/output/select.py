"""Which format a model's tool calls and reasoning have, by its card or a setting, else by its chat template."""

import re
from typing import Any

from pagestream_streams.protocol.output_formats import (
    BY_TEMPLATE,
    NONE,
    REASONING_PARSERS,
    TOOL_CALL_PARSERS,
    OutputParsers,
)

from pagestream_gateway.core.output.calls.deepseek import CALLS_BEGIN
from pagestream_gateway.core.output.calls.tagged import SEED_CALL
from pagestream_gateway.core.output.formats import HARMONY, HARMONY_REASONING
from pagestream_gateway.core.output.harmony import CHANNEL, MESSAGE
from pagestream_gateway.core.output.reasoning import MARKS, Marks

_SWITCHES = ("enable_thinking", "thinking")
"""Values of templates that ask for reasoning: of Qwen3 and GLM, and of DeepSeek-V3.1."""
_THINKING = re.compile(r"\bthinking\b")
_PYTHONIC = re.compile(r"\[func_name\d?\(")
_BUDGET = "thinking_budget"
"""Likewise of Seed-OSS, which takes a number of tokens."""
_ALWAYS_REASON = ("deepseek_r1", "seed_oss")
"""Parsers that take an output for reasoning until it ends, as vLLM's of these names."""


def is_harmony(template: str) -> bool:
    """Return whether a chat template has the channels of gpt-oss."""
    return CHANNEL in template and MESSAGE in template


def tool_format(template: str, parsers: OutputParsers = BY_TEMPLATE) -> str | None:
    """Return the format of tool calls, "" for none.

    None where no parser is named and the chat template takes no tools, or in a format that is not known here.
    """
    named = parsers.tool_call_parser
    if named == NONE:
        return ""
    return TOOL_CALL_PARSERS.get(named) or _taught_format(template)


def _taught_format(template: str) -> str | None:
    if "tools" not in template:
        return None
    if is_harmony(template):
        return HARMONY
    for marker, name in (
        (CALLS_BEGIN, "deepseek_v3"),
        ("[TOOL_CALLS]", "mistral"),
        (SEED_CALL, "seed_oss"),
        ("<function=", "qwen3_coder"),
        ("<arg_key>", "glm45"),
        ("<tool_call>", "hermes"),
    ):
        if marker in template:
            return name
    if _PYTHONIC.search(template):
        return "pythonic"
    if "<|python_tag|>" in template or ('"parameters"' in template and "ipython" in template):
        return "llama3_json"
    return None


def marks_name(template: str, parsers: OutputParsers = BY_TEMPLATE) -> str:
    """Return whose marks reasoning has, where it has any."""
    named = parsers.reasoning_parser
    if named in REASONING_PARSERS:
        return named if named in MARKS else ""
    return next((name for name, marks in MARKS.items() if name and _has(template, marks)), "")


def reasoning_format(
    template: str, prompt: str, *, continues: bool = False, parsers: OutputParsers = BY_TEMPLATE
) -> str:
    """Return how an output's reasoning is told from its answer; "" where it has none.

    `prompt`: the rendered one, which may open the reasoning; `continues`: whether it ends within a message.
    """
    named = parsers.reasoning_parser
    if named == NONE:
        return ""
    if named == HARMONY_REASONING or (named not in REASONING_PARSERS and is_harmony(template)):
        return HARMONY_REASONING
    marks = MARKS[marks_name(template, parsers)]
    if named not in REASONING_PARSERS and not _has(template, marks):
        return ""
    is_within = continues and prompt.rfind(marks.begin) > prompt.rfind(marks.end)
    is_open = is_within or prompt.rstrip().endswith(marks.begin)
    is_always = named in _ALWAYS_REASON and not is_reasoning_over(prompt, marks, continues=continues)
    return "open" if is_open or is_always else "think"


def is_reasoning_over(prompt: str, marks: Marks = MARKS[""], *, continues: bool = False) -> bool:
    """Return whether a prompt that leaves no reasoning open leaves no room for it either."""
    return continues or prompt.rstrip().endswith(marks.end)


def reasoning_arguments(template: str, *, reasons: bool) -> dict[str, Any] | None:
    """Return the values with which a chat template asks for reasoning or for none; None where it can't be asked.

    A template without a switch asks for what it always does.
    """
    switch, other = _SWITCHES
    if switch in template:
        return {switch: reasons}
    if is_harmony(template):
        return {} if reasons else None
    name = marks_name(template)
    if name == "seed_oss" and _BUDGET in template:
        return {} if reasons else {_BUDGET: 0}
    has_marks = _has(template, MARKS[name])
    if has_marks and not name and _THINKING.search(template):
        return {other: reasons}
    return {} if has_marks is reasons else None


def _has(template: str, marks: Marks) -> bool:
    return marks.begin in template or marks.end in template
