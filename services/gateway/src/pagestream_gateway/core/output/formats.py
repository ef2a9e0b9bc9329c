"""The formats in which models write tool calls."""

from pagestream_gateway.core.output.hermes import Hermes
from pagestream_gateway.core.output.json_calls import JsonCalls, NamedCall, RequiredCalls
from pagestream_gateway.core.output.mistral import Mistral
from pagestream_gateway.core.output.parts import OutputParser, PlainText
from pagestream_gateway.core.output.pythonic import Pythonic

FORMATS: dict[str, type[Hermes | JsonCalls | Mistral | Pythonic | NamedCall]] = {
    "hermes": Hermes,
    "llama3_json": JsonCalls,
    "mistral": Mistral,
    "pythonic": Pythonic,
    "required": RequiredCalls,
    "named": NamedCall,
}
"""By the name that a request's record has."""


def parser_of_calls(name: str, tools: frozenset[str]) -> OutputParser:
    """Return a new parser of a format; that of no format gives content alone."""
    return FORMATS[name](tools) if name in FORMATS else PlainText()
