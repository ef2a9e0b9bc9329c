"""Which format a model's tool calls and reasoning have, by its chat template."""

import re

from pagestream.v1.records_pb2 import OutputForm

from pagestream_gateway.core.output.formats import parser_of_calls
from pagestream_gateway.core.output.parts import OutputParser
from pagestream_gateway.core.output.reasoning import BEGIN, END, Think

_OTHERS = ("<function=", "<arg_key>")
"""Of formats that are not known here: Qwen3-Coder's and GLM's."""
_SWITCH = "enable_thinking"
_PYTHONIC = re.compile(r"\[func_name\d?\(")


def tool_format(template: str) -> str | None:
    """Return the format of tool calls that a chat template teaches; None where it takes no tools, or in another one."""
    if "tools" not in template or any(each in template for each in _OTHERS):
        return None
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<tool_call>" in template:
        return "hermes"
    if _PYTHONIC.search(template):
        return "pythonic"
    if "<|python_tag|>" in template or ('"parameters"' in template and "ipython" in template):
        return "llama3_json"
    return None


def reasoning_format(template: str, prompt: str, *, continues: bool = False) -> str:
    """Return how an output's reasoning is told from its answer; "" where the template knows none.

    `prompt`: the rendered one, which may open the reasoning; `continues`: whether it ends within a message.
    """
    if BEGIN not in template and END not in template:
        return ""
    is_within = continues and prompt.rfind(BEGIN) > prompt.rfind(END)
    return "open" if is_within or prompt.rstrip().endswith(BEGIN) else "think"


def reasoning_arguments(template: str, *, reasons: bool) -> dict[str, bool] | None:
    """Return the values with which a chat template asks for reasoning or for none; None where it can't be asked.

    A template without the switch that most have asks for what it always does.
    """
    if _SWITCH in template:
        return {_SWITCH: reasons}
    return {} if (BEGIN in template or END in template) is reasons else None


def parser_of(form: OutputForm) -> OutputParser:
    """Return a new parser of one choice's text."""
    inner = parser_of_calls(form.tool_format, frozenset(form.tool_names))
    return Think(inner, is_open=form.reasoning_format == "open") if form.reasoning_format else inner
