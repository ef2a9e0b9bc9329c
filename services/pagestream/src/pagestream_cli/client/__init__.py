"""The gateways of a deployment as commands see them: which ones there are, and their answers in the terminal.

Names are imported when they are used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pagestream_cli.client.endpoint import API_KEY_VARIABLE, Endpoint, find_endpoint
    from pagestream_cli.client.gateways import choose_model, list_models, show_answer, stream_answer

__all__ = [
    "API_KEY_VARIABLE",
    "Endpoint",
    "choose_model",
    "find_endpoint",
    "list_models",
    "show_answer",
    "stream_answer",
]

_MODULES = {
    **dict.fromkeys(("choose_model", "list_models", "show_answer", "stream_answer"), "gateways"),
    **dict.fromkeys(("API_KEY_VARIABLE", "Endpoint", "find_endpoint"), "endpoint"),
}
"""The module that defines each exported name."""


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
