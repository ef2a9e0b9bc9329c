"""What an executor does beside its steps, for sequences that wait: it compiles grammars, and reads adapters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from pagestream_engine.errors import InvariantViolation
from pagestream_engine.grammar.compiler import GrammarCompiler
from pagestream_engine.request.adapter import AdapterLoad, LoadedAdapter
from pagestream_engine.request.grammars import Grammar, PreparedGrammar

Preparation = Grammar | AdapterLoad
Prepared = PreparedGrammar | LoadedAdapter


@runtime_checkable
class GrammarRunner(Protocol):
    """A runner whose rows may have a grammar."""

    @property
    def grammars(self) -> GrammarCompiler:
        """Compiles them."""
        ...


class AdapterReader(Protocol):
    """Reads adapters on a thread of its own."""

    def load(self, load: AdapterLoad, reply: Callable[[LoadedAdapter], None]) -> None:
        """Evict what a load names, between two steps, and begin to read its adapter; `reply` is called with what came
        of it, on another thread, once steps may have rows with the adapter."""
        ...

    def close(self) -> None:
        """End the thread."""
        ...


@runtime_checkable
class AdaptingRunner(Protocol):
    """A runner whose rows may have an adapter."""

    @property
    def adapters(self) -> AdapterReader | None:
        """Reads them; None where they are off."""
        ...


def prepare(runner: object, wanted: Preparation, reply: Callable[[Prepared], None]) -> None:
    """Let a runner begin with a preparation.

    Args:
        runner: of the executor.
        wanted: what to prepare.
        reply: called with what came of it, on another thread.

    Raises:
        InvariantViolation: the runner has no such thing, so that no request should have asked for it.
    """
    if isinstance(wanted, Grammar) and isinstance(runner, GrammarRunner):
        runner.grammars.prepare(wanted, reply)
    elif isinstance(wanted, AdapterLoad) and isinstance(runner, AdaptingRunner) and runner.adapters is not None:
        runner.adapters.load(wanted, reply)
    else:
        raise InvariantViolation(f"{type(runner).__name__}: given {type(wanted).__name__}, which it can't prepare")
