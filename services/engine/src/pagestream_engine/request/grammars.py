"""The grammar of a request's constraint, and what came of compiling it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from pagestream_grammars import Grammar, GrammarError

from pagestream_engine.errors import InvalidSamplingParams, RequestFault

__all__ = ["Grammar", "PreparedGrammar", "checked"]


class PreparedGrammar(NamedTuple):
    """A grammar that was compiled, or could not be."""

    grammar: Grammar
    error: RequestFault | None


@contextmanager
def checked() -> Iterator[None]:
    """Raise InvalidSamplingParams for a constraint that is refused within the block."""
    try:
        yield
    except GrammarError as fault:
        raise InvalidSamplingParams(f"structured_outputs.{fault.field}", fault.given, fault.expected) from fault
