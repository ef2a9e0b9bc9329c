"""The formats in which models write tool calls."""

from collections.abc import Callable

from pagestream.v1.records_pb2 import OutputForm

from pagestream_gateway.core.output import harmony
from pagestream_gateway.core.output.blanks import BlanksAtOnce
from pagestream_gateway.core.output.calls.arguments import recorded_types
from pagestream_gateway.core.output.calls.deepseek import DeepSeek
from pagestream_gateway.core.output.calls.hermes import Hermes
from pagestream_gateway.core.output.calls.json_calls import JsonCalls, NamedCall, RequiredCalls
from pagestream_gateway.core.output.calls.mistral import Mistral
from pagestream_gateway.core.output.calls.pythonic import Pythonic
from pagestream_gateway.core.output.calls.tagged import Glm, QwenCoder, SeedOss, TaggedCalls
from pagestream_gateway.core.output.harmony import Harmony
from pagestream_gateway.core.output.parts import OutputParser, PlainText
from pagestream_gateway.core.output.reasoning import MARKS, CallsWithin, Think

HARMONY, HARMONY_REASONING = "openai", "openai_gptoss"
_BY_NAMES: dict[str, Callable[[frozenset[str]], OutputParser]] = {
    "hermes": Hermes,
    "llama3_json": JsonCalls,
    "mistral": Mistral,
    "pythonic": Pythonic,
    "deepseek_v3": DeepSeek,
    "required": RequiredCalls,
    "named": NamedCall,
}
TYPED_FORMATS: dict[str, type[TaggedCalls]] = {"qwen3_coder": QwenCoder, "seed_oss": SeedOss, "glm45": Glm}
"""Those that spell arguments as text, and need the parameters' types."""
FORMATS = (*_BY_NAMES, *TYPED_FORMATS, HARMONY)
"""Names that a request's record has."""

FORCED = ("required", "named")
"""Those of them that a grammar forces, with any model."""
_MARKED = ("hermes", "mistral", "deepseek_v3", *TYPED_FORMATS)
"""Formats whose calls have a mark at their beginning, so that they are found anywhere."""

_CALL_MARKERS: dict[str, tuple[str, ...]] = {
    "hermes": (Hermes.BEGIN, Hermes.END),
    "llama3_json": (JsonCalls.MARKER,),
    "mistral": Mistral.MARKERS,
    "deepseek_v3": DeepSeek.MARKERS,
    "qwen3_coder": QwenCoder.MARKERS,
    "seed_oss": SeedOss.MARKERS,
    "glm45": Glm.MARKERS,
    HARMONY: harmony.MARKERS,
}


def markers_of(form: OutputForm) -> tuple[str, ...]:
    """Return what a format is told by, which the text must show where these are special tokens of a model."""
    calls = _CALL_MARKERS.get(form.tool_format, ())
    if form.reasoning_format == HARMONY_REASONING:
        return (*calls, *harmony.MARKERS)
    if not form.reasoning_format:
        return calls
    within = _CALL_MARKERS.get(_format_within(form), ())
    return (*calls, *within, *MARKS.get(form.reasoning_marks, MARKS[""]))


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
    name = _format_within(form)
    within = CallsWithin(lambda: _calls_within(name, form), _CALL_MARKERS[name][0][0]) if name else None
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
    if name in _BY_NAMES:
        return _BY_NAMES[name](names)
    return TYPED_FORMATS[name](names, recorded_types(form)) if name in TYPED_FORMATS else PlainText()


def _calls_within(name: str, form: OutputForm) -> OutputParser:
    if name == "mistral":
        return Mistral(frozenset(form.tool_names), is_marked=True)
    return _calls_parser(name, form)


def _format_within(form: OutputForm) -> str:
    """Return the format of calls that are looked for in reasoning; "" where none are."""
    name = form.own_format if form.tool_format in FORCED else form.tool_format
    return name if name in _MARKED else ""
