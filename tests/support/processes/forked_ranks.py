"""Executors and ranks that tests start in their own process, forked from one that has imported what they need."""

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.context import BaseContext, ForkServerContext

import pytest

MODULES = (
    "torch",
    "transformers",
    "pagestream_engine.engine",
    "pagestream_engine.executor.rank_child",
    "pagestream_engine.runner",
)


@contextmanager
def forked_ranks() -> Iterator[None]:
    """Give those who ask for a context that spawns processes one that forks them from a server, for a block.

    A spawned process imports torch for itself, which takes longer than most tests of it. The server starts with the
    first process, with the environment of that moment, and lives as long as this process.
    """
    get_context = multiprocessing.get_context

    def get_forking(method: str | None = None) -> BaseContext:
        return ForkServerContext() if method == "spawn" else get_context(method)

    multiprocessing.set_forkserver_preload(list(MODULES))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multiprocessing, "get_context", get_forking)
        yield
