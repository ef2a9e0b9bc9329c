from __future__ import annotations

import sys

import pytest
from pagestream_worker import EngineProcess
from support.processes.forked_core import ForkedCore


@pytest.fixture
def starts_by_itself() -> bool:
    """Whether an engine's process is an interpreter of its own, as with a user."""
    return False


@pytest.fixture(autouse=True)
def forked_engines(monkeypatch: pytest.MonkeyPatch, starts_by_itself: bool) -> None:
    """Fork the engines' processes, but where a test is about their start."""
    if not starts_by_itself:
        monkeypatch.setattr(sys.modules[EngineProcess.__module__], "launch", ForkedCore)
