"""Says in a request's record how its output is divided, so that each reader divides it alike."""

from pagestream.v1.records_pb2 import AnswerForm, OutputForm

from pagestream_gateway.core.drafts import ChatPrompt
from pagestream_gateway.core.models import LoadedModel
from pagestream_gateway.core.output.calls.arguments import record_types
from pagestream_gateway.core.output.formats import HARMONY, HARMONY_REASONING, MARKERS, TYPED_FORMATS
from pagestream_gateway.core.output.harmony import FINAL, MESSAGE, START, call_header
from pagestream_gateway.core.output.select import reasoning_format, tool_format
from pagestream_gateway.errors import UnsupportedField


def set_output_form(answer: AnswerForm, chat: ChatPrompt, model: LoadedModel, prompt: str, *, is_free: bool) -> str:
    """Set `answer.output` for a chat with `prompt`, as its template has rendered it.

    `is_free`: whether no grammar holds the output, which would leave no room for reasoning. Returns what the prompt
    ends with beside that: where a grammar holds an output in channels, the one that it is for has to be open. Raises
    UnsupportedField for tools where neither the template nor a setting says how the model writes calls.
    """
    tools, template, parsers = chat.tools, model.card.chat_template, model.parsers
    found = tool_format(template, parsers)
    written = tools.forced_format or (found if tools.definitions else "")
    if written is None:
        raise UnsupportedField(
            "tools",
            f"model {model.name}: its chat template takes no tools, or in a format that is not known here; set "
            '--tool-call-parser, or tool_choice "required", which works with any model',
        )
    reasoning = reasoning_format(template, prompt, continues=chat.continue_final_message, parsers=parsers)
    is_harmony = HARMONY in (found, written) or reasoning == HARMONY_REASONING
    answer.ClearField("output")
    if is_harmony and not is_free:
        opening = call_header(tools.forced_name) if written == "named" else FINAL
        prompt_end = "" if chat.continue_final_message else opening
    else:
        prompt_end = ""
    if not is_free or not chat.separate_reasoning:
        reasoning = ""
    if is_harmony and is_free:
        written, answer.output.opening = HARMONY, _open_header(prompt) if chat.continue_final_message else ""
        reasoning = HARMONY_REASONING if reasoning else ""
    if not written and not reasoning:
        return prompt_end
    answer.output.reasoning_format = reasoning
    answer.output.tool_format = written
    if written and tools.definitions:
        answer.output.tool_names.extend(tools.names)
        answer.output.one_call = tools.one_call
        if written in TYPED_FORMATS:
            functions = [each["function"] for each in tools.definitions]
            record_types(answer.output, {each["name"]: each.get("parameters") for each in functions})
    return prompt_end


def shows_special_tokens(form: OutputForm, model: LoadedModel) -> bool:
    """Return whether a format is told by special tokens of the model, so that the text has to show those."""
    markers = (*MARKERS.get(form.tool_format, ()), *MARKERS.get(form.reasoning_format, ()))
    return not model.special_tokens.isdisjoint(markers)


def _open_header(prompt: str) -> str:
    """Return the header of the message within which a prompt ends."""
    header, marker, _ = prompt[prompt.rfind(START) + len(START) :].partition(MESSAGE)
    return header.removeprefix("assistant") + marker if marker and START in prompt else FINAL
