"""What an executor does beside its steps: it compiles grammars and reads adapters, for sequences that wait; and between
two steps it gives up memory, and takes it again."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol, runtime_checkable

from pagestream_engine.errors import InvariantViolation
from pagestream_engine.features.grammar.compiler import GrammarCompiler
from pagestream_engine.plan import AdapterLoad, LoadedAdapter, PreparedGrammar
from pagestream_engine.sampling_params import Grammar
from pagestream_engine.wire.executor import Preparation, Prepared, SleepChange, SleepChanged


class PreparedByAll:
    """What the ranks of a group have prepared, each for itself: a preparation is done when all have replied."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._replies: dict[object, list[deque[Prepared]]] = {}
        """By what was prepared, those of each rank that others have not given yet."""

    def note(self, rank: int, replies: Iterable[Prepared]) -> None:
        """Take replies of a rank."""
        for reply in replies:
            key = _key(reply)
            self._replies.setdefault(key, [deque() for _ in range(self._num_ranks)])[rank].append(reply)

    def take(self) -> list[Prepared]:
        """Return what is done, once. What one rank could not do has failed."""
        done: list[Prepared] = []
        for key, of_ranks in list(self._replies.items()):
            while all(of_ranks):
                replies = [of_rank.popleft() for of_rank in of_ranks]
                failed = (each for each in replies if each.error is not None)
                done.append(next(failed, replies[0]))
            if not any(of_ranks):
                del self._replies[key]
        return done


def _key(reply: Prepared) -> object:
    """Return what the replies of all ranks to one preparation have in common."""
    match reply:
        case LoadedAdapter():
            return reply.revision
        case SleepChanged():
            return reply.is_asleep
        case PreparedGrammar():
            return reply.grammar  # whatever each rank's error says


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


@runtime_checkable
class SleepingRunner(Protocol):
    """A runner that can give up memory, and take it again."""

    def sleep(self) -> None:
        """Release the cache and what steps work with; keep the weights in host memory."""
        ...

    def wake_up(self) -> None:
        """Be as after the load, with an empty cache of the same size.

        Raises:
            ConfigError: there is no memory for it any more.
        """
        ...


def prepare(runner: object, wanted: Preparation, reply: Callable[[Prepared], None]) -> None:
    """Let a runner begin with a preparation.

    Args:
        wanted: what to prepare.
        reply: called with what came of it, on another thread where it is done beside the steps.

    Raises:
        InvariantViolation: the runner has no such thing, so that no request should have asked for it.
    """
    if isinstance(wanted, Grammar) and isinstance(runner, GrammarRunner):
        runner.grammars.prepare(wanted, reply)
    elif isinstance(wanted, AdapterLoad) and isinstance(runner, AdaptingRunner) and runner.adapters is not None:
        runner.adapters.load(wanted, reply)
    elif isinstance(wanted, SleepChange) and isinstance(runner, SleepingRunner):
        reply(_changed(runner, wanted))
    else:
        raise InvariantViolation(f"{type(runner).__name__}: given {type(wanted).__name__}, which it can't prepare")


def _changed(runner: SleepingRunner, wanted: SleepChange) -> SleepChanged:
    try:
        if wanted.is_asleep:
            runner.sleep()
        else:
            runner.wake_up()
    except Exception as error:  # noqa: BLE001 - of devices and allocators; the engine is told, and gives the executor up
        return SleepChanged(wanted.is_asleep, f"{type(error).__name__}: {error}")
    return SleepChanged(wanted.is_asleep, None)
