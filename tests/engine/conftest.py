"""Tiny models that the tests of a session share. Nothing here imports torch: the scheduler's tests need none."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from multiprocessing.context import BaseContext, ForkServerContext
from pathlib import Path
from typing import Any

import pytest

IMPORTED = (
    "torch",
    "transformers",
    "pagestream_engine.engine",
    "pagestream_engine.executor.child",
    "pagestream_engine.runner",
)
"""Modules that the process has from which ranks are forked."""
MakeModel = Callable[..., Path]
"""(name in `TINY_MODELS`, fields of its configuration that differ) -> a folder, made once a session."""


@pytest.fixture(scope="session")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> MakeModel:
    """Return the folder of a tiny model; tests must not change its files."""
    from support.engines.tiny_models import make_model

    base = tmp_path_factory.mktemp("tiny-models")
    made: dict[str, Path] = {}

    def get(name: str, **changes: Any) -> Path:
        key = f"{name} {sorted(changes.items())}"
        if key not in made:
            made[key] = make_model(base / f"{name}-{len(made)}", name, **changes)
        return made[key]

    return get


@pytest.fixture(scope="session")
def llama(model_of: MakeModel) -> Path:
    """A tiny Llama, the model of most tests."""
    return model_of("llama")


@pytest.fixture(scope="session")
def ranks() -> Iterator[None]:
    """Let engines fork their executors and ranks from one process that has imported torch.

    A spawned process imports torch for itself, which takes longer than most tests of it. The server starts with the
    first process, with the environment of that moment, and lives as long as this process.
    """
    get_context = multiprocessing.get_context

    def get_forking(method: str | None = None) -> BaseContext:
        return ForkServerContext() if method == "spawn" else get_context(method)

    multiprocessing.set_forkserver_preload(list(IMPORTED))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multiprocessing, "get_context", get_forking)
        yield


@pytest.fixture
def most_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every decode have all drafts that were found: whether they pay depends on times."""
    monkeypatch.setattr(
        "pagestream_engine.features.speculation.draft_model.DraftLengths.wanted", lambda self, _: self._most
    )
