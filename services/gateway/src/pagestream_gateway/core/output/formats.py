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
from pagestream_gateway.core.output.calls.tagged import Glm, QwenCoder, TaggedCalls
from pagestream_gateway.core.output.harmony import Harmony
from pagestream_gateway.core.output.parts import OutputParser, PlainText
from pagestream_gateway.core.output.reasoning import BEGIN, END, Think

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
TYPED_FORMATS: dict[str, type[TaggedCalls]] = {"qwen3_coder": QwenCoder, "glm45": Glm}
"""Those that spell arguments as text, and need the parameters' types."""
FORMATS = (*_BY_NAMES, *TYPED_FORMATS, HARMONY)
"""Names that a request's record has."""

MARKERS: dict[str, tuple[str, ...]] = {
    "hermes": (Hermes.BEGIN, Hermes.END),
    "llama3_json": (JsonCalls.MARKER,),
    "mistral": (Mistral.BEGIN, Mistral.ARGS),
    "deepseek_v3": DeepSeek.MARKERS,
    "qwen3_coder": QwenCoder.MARKERS,
    "glm45": Glm.MARKERS,
    HARMONY: harmony.MARKERS,
    "think": (BEGIN, END),
    "open": (BEGIN, END),
}
"""What a format is told by, which the text must show where these are special tokens of a model."""


def parser_of(form: OutputForm) -> OutputParser:
    """Return a new parser of one choice's text; that of a format which is not known here gives content alone."""
    parser = _parser_of(form)
    return parser if isinstance(parser, PlainText) else BlanksAtOnce(parser)


def _parser_of(form: OutputForm) -> OutputParser:
    names, name = frozenset(form.tool_names), form.tool_format
    if name == HARMONY:
        return Harmony(names, separates=bool(form.reasoning_format), opening=form.opening)
    inner: OutputParser = PlainText()
    if name in _BY_NAMES:
        inner = _BY_NAMES[name](names)
    elif name in TYPED_FORMATS:
        inner = TYPED_FORMATS[name](names, recorded_types(form))
    if not form.reasoning_format:
        return inner
    return Think(inner, is_open=form.reasoning_format == "open", keeps_blanks=form.keeps_blanks)
