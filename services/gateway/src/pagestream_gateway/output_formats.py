"""The formats in which models write tool calls and reasoning: which of them a model has, and which an answer has.

An answer's are written into its request's record, so that each reader divides it alike. Where an answer of a form
stands beside calls of tools, one grammar holds the output to both.
"""

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

from pagestream.v1.inference_pb2 import StructuredOutputs, TokenIds
from pagestream.v1.records_pb2 import API_FORM_GRPC, OutputForm, ReasoningMarks
from pagestream_grammars import GrammarError, json_grammar
from pagestream_grammars.output_formats.declaration import CallWriter, call_schema, json_rule
from pagestream_grammars.output_formats.json_calls import NamedCall, RequiredCalls
from pagestream_grammars.output_formats.parts import BlanksAtOnce, OutputParser, PlainText, Types
from pagestream_grammars.output_formats.reasoning import MARKS, REASONING_PARSERS, CallsWithin, Marks, Think
from pagestream_grammars.output_formats.registry import BY_TEMPLATE, NONE, TOOL_FORMATS, OutputParsers, tool_format
from pagestream_grammars.output_formats.tagged import STRING, types_of
from pagestream_grammars.output_formats.tool_calls import harmony
from pagestream_grammars.output_formats.tool_calls.harmony import (
    FINAL,
    MESSAGE,
    START,
    Harmony,
    call_header,
    harmony_rules,
    is_harmony,
)

from pagestream_gateway.errors import InvalidRequest, UnsupportedField
from pagestream_gateway.models import LoadedModel
from pagestream_gateway.request import ChatPrompt, Draft, Tools
from pagestream_gateway.sampling import schema_text


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


@dataclass(frozen=True)
class TemplateFormats:
    """What a model's chat template says of its outputs, and of the messages that it takes."""

    calls: str | None
    """See `tool_format`; as the gateway's settings and the card have it."""
    has_short_ids: bool
    """Whether the template takes short ids of calls alone."""
    is_harmony: bool
    """Whether it has the channels of gpt-oss."""
    knows_developer: bool
    """Whether it knows the role."""
    divides: bool
    """Whether an output without tools may have parts beside its content."""

    @classmethod
    def of(cls, model: LoadedModel) -> Self:
        """Find out about a model: `model.once(TemplateFormats.of)`."""
        template, parsers = model.card.chat_template, model.parsers
        calls = tool_format(template, parsers)
        reasons = bool(reasoning_format(template, "", parsers=parsers))
        return cls(
            calls,
            has_short_ids(tool_format(template)),
            is_harmony(template),
            "developer" in template,
            reasons or calls == HARMONY,
        )


def set_output_form(draft: Draft, chat: ChatPrompt, model: LoadedModel, prompt: str) -> str:
    """Set how the answer to a chat with `prompt`, as its template has rendered it, is divided, where it is.

    Sets `draft.answer.output`, and `draft.marks` where reasoning may come before what a grammar holds. Returns what the
    prompt ends with beside that: where a grammar holds an output in channels, and does not choose among them, the one
    that it is for has to be open.
    Raises UnsupportedField for tools where neither the template nor a setting says how the model writes calls.
    """
    answer, tools, formats = draft.answer, chat.tools, model.once(TemplateFormats.of)
    found, template, parsers = formats.calls, model.card.chat_template, model.parsers
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
        if written in _TYPED_FORMATS or answer.output.own_format in _TYPED_FORMATS:
            functions = [each["function"] for each in tools.definitions]
            record_types(answer.output, {each["name"]: each.get("parameters") for each in functions})
    return prompt_end


def may_call(chat: ChatPrompt, model: LoadedModel) -> bool:
    """Return whether an output of a form may be calls in its place.

    With gpt-oss an output of channels may be, which begins with one, and whose reasoning is no content.
    """
    has_tools = bool(chat.tools.definitions) and not chat.tools.is_forced
    has_channels = chat.separate_reasoning and not chat.continue_final_message
    is_harmony = model.once(TemplateFormats.of).calls == HARMONY
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


def recorded_types(form: OutputForm) -> Types:
    """Return the types that a request's record has."""
    return {tool.name: {each.name: tuple(each.types) for each in tool.parameters} for tool in form.typed_tools}


def record_types(form: OutputForm, schemas: Mapping[str, object]) -> None:
    """Write the types of tools' parameters into a record; those that are text alone, as all others, are left out."""
    for name, schema in schemas.items():
        types = {key: each for key, each in types_of(schema).items() if each != [STRING]}
        if types:
            tool = form.typed_tools.add(name=name)
            for key, each in types.items():
                tool.parameters.add(name=key, types=each)


HARMONY, HARMONY_REASONING = "openai", "openai_gptoss"
_FORCED: dict[str, Callable[[frozenset[str]], OutputParser]] = {"required": RequiredCalls, "named": NamedCall}
"""What a grammar forces, with any model."""
FORMATS = (*_FORCED, *TOOL_FORMATS)
"""Names that a request's record has."""
_TYPED_FORMATS = {each.name for each in TOOL_FORMATS.values() if each.needs_types}


def _call_markers(name: str) -> tuple[str, ...]:
    return TOOL_FORMATS[name].markers if name in TOOL_FORMATS else ()


def markers_of(form: OutputForm) -> tuple[str, ...]:
    """Return what a format is told by, which the text must show where these are special tokens of a model."""
    calls = _call_markers(form.tool_format)
    if form.reasoning_format == HARMONY_REASONING:
        return (*calls, *harmony.MARKERS)
    if not form.reasoning_format:
        return calls
    within = _call_markers(_format_within(form))
    return (*calls, *within, *MARKS.get(form.reasoning_marks, MARKS[""]).texts)


def parser_of(form: OutputForm) -> OutputParser:
    """Return a new parser of one choice's text; that of a format which is not known here gives content alone."""
    parser = _parser_of(form)
    return parser if isinstance(parser, PlainText) else BlanksAtOnce(parser)


def _parser_of(form: OutputForm) -> OutputParser:
    if form.tool_format == HARMONY:
        return Harmony(frozenset(form.tool_names), separates=bool(form.reasoning_format), opening=form.opening)
    calls = _calls_parser(form.tool_format, form)
    if not form.reasoning_format:
        return calls
    found = TOOL_FORMATS.get(_format_within(form))
    within = None
    if found is not None and found.parser_within is not None:
        names, types = frozenset(form.tool_names), recorded_types(form)
        within = CallsWithin(partial(found.parser_within, names, types), found.markers[0][0])
    return Think(
        calls,
        is_open=form.reasoning_format == "open",
        marks=MARKS.get(form.reasoning_marks, MARKS[""]),
        keeps_blanks=form.keeps_blanks,
        calls_within=within,
        names=frozenset(form.tool_names),
    )


def _calls_parser(name: str, form: OutputForm) -> OutputParser:
    names = frozenset(form.tool_names)
    if name in _FORCED:
        return _FORCED[name](names)
    return TOOL_FORMATS[name].parser(names, recorded_types(form)) if name in TOOL_FORMATS else PlainText()


def _format_within(form: OutputForm) -> str:
    """Return the format of calls that are looked for in reasoning; "" where none are."""
    name = form.own_format if form.tool_format in _FORCED else form.tool_format
    return name if name in TOOL_FORMATS and TOOL_FORMATS[name].parser_within else ""


_SWITCHES = ("enable_thinking", "thinking")
"""Values of templates that ask for reasoning: of Qwen3 and GLM, and of DeepSeek-V3.1."""
_THINKING = re.compile(r"\bthinking\b")
_BUDGET = "thinking_budget"
"""Likewise of Seed-OSS, which takes a number of tokens."""
_ALWAYS_REASON = ("deepseek_r1", "seed_oss")
"""Parsers that take an output for reasoning until it ends, as vLLM's of these names."""


def marks_name(template: str, parsers: OutputParsers = BY_TEMPLATE) -> str:
    """Return whose marks reasoning has, where it has any."""
    named = parsers.reasoning_parser
    if named in REASONING_PARSERS:
        return REASONING_PARSERS[named]
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
    if has_marks and MARKS[name].begin == MARKS[""].begin and _THINKING.search(template):
        return {other: reasons}
    return {} if has_marks is reasons else None


def _has(template: str, marks: Marks) -> bool:
    has_answer = not marks.answers or any(begin in template for begin, _ in marks.answers)
    return has_answer and (marks.begin in template or marks.end in template)


_LENGTH = 9
_TAKEN_BY_MISTRAL = re.compile(rf"[A-Za-z0-9]{{{_LENGTH}}}")
"""Its templates refuse any other id, as mistral-common does."""


def call_id(place: str, form: OutputForm, name: str, number: int) -> str:
    """Return the id of a call of a tool at a place: a request, its choice, and the call's number there.

    It is as the model's template takes it; where a record doesn't say whose calls a grammar forces, so short that each
    template does.
    """
    own = form.own_format if form.tool_format in _FORCED else form.tool_format
    if own in TOOL_FORMATS and (spelled := TOOL_FORMATS[own].call_id):
        return spelled.format(name=name, number=number)
    digest = _digest(place)
    return digest[:_LENGTH] if not own or has_short_ids(own) else f"call_{digest[:24]}"


def has_short_ids(name: str | None) -> bool:
    """Return whether templates of models with a format of calls take short ids alone."""
    found = TOOL_FORMATS.get(name or "")
    return found is not None and found.has_short_ids


def with_short_ids(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return a conversation whose calls and results have ids that Mistral's templates take.

    Those of other servers become their last nine characters, as in vLLM; where that is none, or another call's, they
    become others that depend on the id alone. A call and its result stay together.
    """
    given = [each["id"] for message in messages for each in message.get("tool_calls") or ()]
    given += [each for message in messages if (each := message.get("tool_call_id")) is not None]
    short = {each: each for each in given if _TAKEN_BY_MISTRAL.fullmatch(each)}
    taken = set(short)
    for each in given:
        if each not in short:
            end = each[-_LENGTH:]
            is_free = _TAKEN_BY_MISTRAL.fullmatch(end) and end not in taken
            short[each] = end if is_free else _digest(each)[:_LENGTH]
            taken.add(short[each])
    return [_with_ids(message, short) for message in messages]


def _with_ids(message: Mapping[str, Any], short: Mapping[str, str]) -> Mapping[str, Any]:
    found = dict(message)
    if message.get("tool_calls"):
        found["tool_calls"] = [{**each, "id": short[each["id"]]} for each in message["tool_calls"]]
    if message.get("tool_call_id") is not None:
        found["tool_call_id"] = short[message["tool_call_id"]]
    return found


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def with_calls(constraint: StructuredOutputs, tools: Tools, model: LoadedModel, field: str) -> StructuredOutputs:
    """Return what an output must match that is `constraint`'s, or calls of tools in the model's format.

    Either may have blanks before it, as models write them behind their reasoning, and calls may have some behind.
    Arguments are held to the tools' schemas. Raises UnsupportedField, with `field`, where the format of calls has no
    grammar here, and for constraints that are no JSON.
    """
    kind = constraint.WhichOneof("constraint")
    is_json = kind in ("json", "json_object")
    if is_json:
        answer = _schema(constraint.json, field) if kind == "json" else {"type": "object"}
        _schema(schema_text(call_schema(tools.definitions, "arguments"), "tools"), "tools")
    writer = CallWriter(tools.definitions, tools.one_call, model.tokens, model.card.chat_template)
    name = tool_format(model.card.chat_template, model.parsers) or ""
    if is_json and name == HARMONY:
        return StructuredOutputs(grammar=harmony_rules(writer, json_rule(answer)))
    write = TOOL_FORMATS[name].rules if is_json and name else None
    if write is None:
        reason = "its calls have no grammar here" if is_json else "only JSON can stand beside calls"
        raise UnsupportedField(
            field,
            f'with tools that may be called: model {model.name}: {reason}; use tool_choice "none" for the last '
            'answer, or "required"',
        )
    start = "start: BLANKS? (answer | calls BLANKS?)\nBLANKS: /[ \\t\\r\\n]{1,8}/"
    return StructuredOutputs(grammar=f"{start}\nanswer: {json_rule(answer)}\n{write(writer)}")


def _schema(text: str, field: str) -> Any:
    """Return a schema that may be compiled. Raises InvalidRequest."""
    try:
        return json.loads(json_grammar(text).text)
    except GrammarError as error:
        raise InvalidRequest(field, str(error)) from error
