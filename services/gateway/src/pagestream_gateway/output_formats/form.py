"""Record with a request how its output is divided, so that each reader divides it alike."""

from pagestream.v1.inference_pb2 import TokenIds
from pagestream.v1.records_pb2 import API_FORM_GRPC, OutputForm, ReasoningMarks

from pagestream_gateway.errors import UnsupportedField
from pagestream_gateway.models import LoadedModel
from pagestream_gateway.output_formats.formats import (
    HARMONY,
    HARMONY_REASONING,
    TYPED_FORMATS,
    is_reasoning_over,
    markers_of,
    marks_name,
    reasoning_format,
    tool_format,
)
from pagestream_gateway.output_formats.harmony import FINAL, MESSAGE, START, call_header
from pagestream_gateway.output_formats.reasoning import MARKS, Marks
from pagestream_gateway.output_formats.tagged import record_types
from pagestream_gateway.request import ChatPrompt, Draft


def reasoning_marks(model: LoadedModel, prompt: str, marks: Marks, *, is_open: bool) -> ReasoningMarks | None:
    """Return the marks of an output's reasoning; None where a grammar has to hold from the first token.

    That is so where the model's engines know no marks, and where a mark is no token of its vocabulary: text may be
    written in any tokens, and the engine compares tokens.

    Args:
        prompt: as its template has rendered it.
        marks: their texts.
        is_open: whether the prompt has opened the reasoning, which the output may do otherwise.
    """
    begin, end = model.tokenizer.token_to_id(marks.begin), model.tokenizer.token_to_id(marks.end)
    if end is None or not model.card.takes_output_constraints:
        return None
    if is_open:
        return ReasoningMarks(end=TokenIds(ids=[end]))
    if begin is None:
        return None
    openings = [[begin]]
    if not prompt[-1:].isspace():  # GLM's outputs begin with a line end
        on_a_line = model.tokenizer.encode(f"\n{marks.begin}", add_special_tokens=False).ids
        openings += [on_a_line] if on_a_line[1:] == [begin] else []
    return ReasoningMarks(end=TokenIds(ids=[end]), openings=[TokenIds(ids=each) for each in openings])


def set_output_form(draft: Draft, chat: ChatPrompt, model: LoadedModel, prompt: str) -> str:
    """Set how the answer to a chat with `prompt`, as its template has rendered it, is divided.

    Sets `draft.answer.output`, and `draft.marks` where reasoning may come before what a grammar holds. Returns what the
    prompt ends with beside that: where a grammar holds an output in channels, and does not choose among them, the one
    that it is for has to be open.
    Raises UnsupportedField for tools where neither the template nor a setting says how the model writes calls.
    """
    answer, tools, template, parsers = draft.answer, chat.tools, model.card.chat_template, model.parsers
    found = tool_format(template, parsers)
    is_free = not draft.sampling.HasField("structured_outputs") or (found == HARMONY and may_call(chat, model))
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
    draft.marks.Clear()
    if is_harmony and not is_free:
        opening = call_header(tools.forced_name) if written == "named" else FINAL
        prompt_end = "" if chat.continue_final_message else opening
    else:
        prompt_end = ""
    if not chat.separate_reasoning:
        reasoning = ""
    if not is_free:
        marks = _marks(draft, chat, model, prompt, reasoning)
        draft.marks.CopyFrom(marks)
        reasoning = reasoning if marks.HasField("end") else ""
    if is_harmony and is_free:
        written, answer.output.opening = HARMONY, _open_header(prompt) if chat.continue_final_message else ""
        reasoning = HARMONY_REASONING if reasoning else ""
    if not written and not reasoning:
        return prompt_end
    answer.output.reasoning_format = reasoning
    if reasoning in ("think", "open"):
        answer.output.reasoning_marks = marks_name(template, parsers)
    answer.output.hides_reasoning = not chat.shows_reasoning
    answer.output.keeps_blanks = bool(reasoning) and not is_free
    answer.output.tool_format = written
    if written and tools.definitions:
        answer.output.tool_names.extend(tools.names)
        answer.output.one_call = tools.one_call
        answer.output.own_format = found if tools.is_forced and found else ""
        if written in TYPED_FORMATS or answer.output.own_format in TYPED_FORMATS:
            functions = [each["function"] for each in tools.definitions]
            record_types(answer.output, {each["name"]: each.get("parameters") for each in functions})
    return prompt_end


def may_call(chat: ChatPrompt, model: LoadedModel) -> bool:
    """Return whether an output of a form may be calls in its place.

    With gpt-oss an output of channels may be, which begins with one, and whose reasoning is no content.
    """
    has_tools = bool(chat.tools.definitions) and not chat.tools.is_forced
    has_channels = chat.separate_reasoning and not chat.continue_final_message
    is_harmony = tool_format(model.card.chat_template, model.parsers) == HARMONY
    return has_tools and (has_channels or not is_harmony)


def _marks(draft: Draft, chat: ChatPrompt, model: LoadedModel, prompt: str, reasoning: str) -> ReasoningMarks:
    """Return the marks of reasoning before what a grammar holds; empty where that holds from the first token.

    Over gRPC nothing is divided, so that the whole text has to match.
    """
    is_open, texts = reasoning == "open", MARKS[marks_name(model.card.chat_template, model.parsers)]
    is_over = is_reasoning_over(prompt, texts, continues=chat.continue_final_message)
    may_begin = reasoning == "think" and not is_over
    if draft.answer.api == API_FORM_GRPC or not (is_open or may_begin):
        return ReasoningMarks()
    return reasoning_marks(model, prompt, texts, is_open=is_open) or ReasoningMarks()


def shows_special_tokens(form: OutputForm, model: LoadedModel) -> bool:
    """Return whether a format is told by special tokens of the model, so that the text has to show those."""
    return not model.special_tokens.isdisjoint(markers_of(form))


def _open_header(prompt: str) -> str:
    """Return the header of the message within which a prompt ends."""
    header, marker, _ = prompt[prompt.rfind(START) + len(START) :].partition(MESSAGE)
    return header.removeprefix("assistant") + marker if marker and START in prompt else FINAL
