"""Which rank of a group hangs, by how far each has got, on a clock of the test."""

from __future__ import annotations

from pathlib import Path

import pytest
from pagestream_engine.executor import stragglers
from pagestream_engine.executor.stragglers import HANG_LIMIT_S, STAGE_LIMIT_S, Stragglers
from pagestream_engine.parallel.place import Progress


class Watched:
    """A group whose first step has taken no time."""

    def __init__(self, folder: Path, size: int, stage_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(stragglers, "monotonic", lambda: self.now)
        self.progress = Progress(folder, size, create=True)
        self.stragglers = Stragglers(self.progress, stage_size)
        self.stragglers.begin()
        self.stragglers.end()

    def found_after(self, seconds: float, *waiting: int) -> int | None:
        """What is found so long after a step has begun in which ranks have not answered."""
        self.stragglers.begin()
        self.stragglers.find(waiting)
        self.now += seconds
        return self.stragglers.find(waiting)


def test_a_stage_that_does_no_layer_hangs_and_those_that_wait_for_it_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = Watched(tmp_path, 3, 1, monkeypatch)
    group.progress.advance(2)  # waits for what stage 1 sends
    assert group.found_after(STAGE_LIMIT_S, 0, 1, 2) is None
    assert group.found_after(STAGE_LIMIT_S + 0.1, 1, 2) == 1
    assert group.found_after(STAGE_LIMIT_S + 0.1, 0, 1, 2) == 0
    group.progress.advance(0)
    assert group.stragglers.find((0, 1, 2)) is None


def test_a_rank_behind_its_stage_hangs_sooner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group = Watched(tmp_path, 4, 2, monkeypatch)
    for _ in range(2):
        group.progress.advance(2)
    assert group.found_after(HANG_LIMIT_S + 0.1, 0, 1, 2, 3) is None, "stage 0 computes"
    assert group.found_after(HANG_LIMIT_S + 0.1, 2, 3) == 3
