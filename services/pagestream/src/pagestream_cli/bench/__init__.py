"""`pagestream bench`: load against a running server, and what it felt like.

Names are imported when they are used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pagestream_cli.bench.http_client import HttpClient
    from pagestream_cli.bench.load import (
        BenchRequest,
        from_prompts,
        from_random,
        from_trace,
        poisson,
        run_load,
        with_poisson,
    )
    from pagestream_cli.bench.options import LengthRange
    from pagestream_cli.bench.results import Outcome, Run, as_json, as_text, spread, summarize, write_plot

__all__ = [
    "BenchRequest",
    "HttpClient",
    "LengthRange",
    "Outcome",
    "Run",
    "as_json",
    "as_text",
    "from_prompts",
    "from_random",
    "from_trace",
    "poisson",
    "run_load",
    "spread",
    "summarize",
    "with_poisson",
    "write_plot",
]

_MODULES = {
    "HttpClient": "http_client",
    "LengthRange": "options",
    **dict.fromkeys(("Outcome", "Run", "as_json", "as_text", "spread", "summarize", "write_plot"), "results"),
    **dict.fromkeys(
        ("BenchRequest", "from_prompts", "from_random", "from_trace", "poisson", "run_load", "with_poisson"), "load"
    ),
}
"""The module that defines each exported name."""


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
