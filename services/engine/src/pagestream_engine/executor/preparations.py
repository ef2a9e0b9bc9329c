"""What an executor does beside its steps, for sequences that wait: it compiles grammars, and reads adapters."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol, runtime_checkable

from pagestream_engine.errors import InvariantViolation
from pagestream_engine.grammar.compiler import GrammarCompiler
from pagestream_engine.request.adapter import AdapterLoad, LoadedAdapter
from pagestream_engine.request.grammars import Grammar, PreparedGrammar

Preparation = Grammar | AdapterLoad
Prepared = PreparedGrammar | LoadedAdapter


class PreparedByAll:
    """What the ranks of a group have prepared, each for itself: a preparation is done when all have replied.

    Args:
        num_ranks: of the group.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._replies: dict[object, list[deque[Prepared]]] = {}
        """By what was prepared, those of each rank that others have not given yet."""

    def note(self, rank: int, replies: Iterable[Prepared]) -> None:
        """Take replies of a rank."""
        for reply in replies:
            key = reply.revision if isinstance(reply, LoadedAdapter) else reply
            self._replies.setdefault(key, [deque() for _ in range(self._num_ranks)])[rank].append(reply)

    def take(self) -> list[Prepared]:
        """Return what is done, once. An adapter that one rank could not read has failed."""
        done: list[Prepared] = []
        for key, of_ranks in list(self._replies.items()):
            while all(of_ranks):
                replies = [of_rank.popleft() for of_rank in of_ranks]
                failed = (each for each in replies if isinstance(each, LoadedAdapter) and each.error is not None)
                done.append(next(failed, replies[0]))
            if not any(of_ranks):
                del self._replies[key]
        return done


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
