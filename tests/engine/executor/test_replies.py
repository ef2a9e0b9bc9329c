"""What a group of ranks has replied: which of them hangs, on a clock of the test, and what all have prepared."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
from pagestream_engine import RequestFault
from pagestream_engine.executor.preparations import PreparedByAll
from pagestream_engine.executor.rank_group import (
    COLLECTIVE_LIMIT_S,
    HANG_LIMIT_S,
    REMOTE_LIMIT_S,
    STAGE_LIMIT_S,
    Stragglers,
)
from pagestream_engine.parallel.progress import StreamProgress
from pagestream_engine.parallel.rank import Progress
from pagestream_engine.plan import LoadedAdapter, PreparedGrammar
from pagestream_grammars import Grammar
from support.processes.waiting import LIMIT_S


class Watched:
    """A group whose first step has taken no time."""

    def __init__(
        self, folder: Path, size: int, stage_size: int, monkeypatch: pytest.MonkeyPatch, num_local: int | None = None
    ) -> None:
        self.now = 0.0
        monkeypatch.setattr("pagestream_engine.executor.rank_group.monotonic", lambda: self.now)
        self.progress = Progress(folder, size, create=True)
        self.stragglers = Stragglers(self.progress, stage_size, num_local)
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


def test_a_first_stage_that_waits_for_drafts_does_not_hang_while_the_last_one_computes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = Watched(tmp_path, 2, 1, monkeypatch)
    assert group.found_after(STAGE_LIMIT_S - 0.1, 0, 1) is None
    group.progress.advance(1)
    assert group.stragglers.find((0, 1)) is None
    group.now += STAGE_LIMIT_S
    assert group.stragglers.find((0, 1)) is None
    group.now += STAGE_LIMIT_S
    assert group.stragglers.find((0, 1)) == 0


def test_a_rank_behind_its_stage_hangs_sooner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group = Watched(tmp_path, 4, 2, monkeypatch)
    for _ in range(2):
        group.progress.advance(2)
    assert group.found_after(HANG_LIMIT_S + 0.1, 0, 1, 2, 3) is None, "stage 0 computes"
    assert group.found_after(HANG_LIMIT_S + 0.1, 2, 3) == 3


def test_ranks_that_stay_in_one_collective_hang_and_those_that_compute_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is stopped after it has entered a collective sends nothing: no rank is behind another."""
    group = Watched(tmp_path, 2, 2, monkeypatch)
    assert group.found_after(HANG_LIMIT_S + 0.1, 0, 1) is None, "both compute"
    with ExitStack() as stack:
        for rank in range(2):
            stack.enter_context(group.progress.collective(rank))
        assert group.found_after(COLLECTIVE_LIMIT_S - 0.1, 0, 1) is None
        assert group.found_after(COLLECTIVE_LIMIT_S + 0.1, 0, 1) == 0
    assert group.found_after(COLLECTIVE_LIMIT_S + 0.1, 0, 1) is None, "both compute"
    assert group.progress.counts() == [2, 2]


class _Stream:
    """What is queued on a GPU, which passes marks when it is told to."""

    def __init__(self) -> None:
        self.num_passed = 0
        self._num_marks = 0

    def mark(self) -> SimpleNamespace:
        self._num_marks += 1
        number = self._num_marks
        return SimpleNamespace(query=lambda: self.num_passed >= number)


def _await_count(progress: Progress, rank: int, count: int) -> None:
    until = time.monotonic() + LIMIT_S
    while progress.count(rank) != count:
        assert time.monotonic() < until, f"{progress.count(rank)}, expected {count}"
        time.sleep(0.01)


def test_a_collective_of_a_gpu_ends_when_its_stream_has_passed_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks have queued a whole step: the first one's GPU has come to the second collective, in which it waits."""
    group = Watched(tmp_path, 2, 2, monkeypatch)
    streams = [_Stream(), _Stream()]
    prepared: list[int] = []
    for rank, stream in enumerate(streams):
        counted = StreamProgress(group.progress, rank, stream.mark, lambda: prepared.append(threading.get_ident()))
        for _ in range(2):
            with counted.collective():
                pass
            counted.advance()
    assert group.progress.counts() == [0, 0], "nothing has run"
    streams[0].num_passed = streams[1].num_passed = 3  # a collective, a layer
    for rank in range(2):
        _await_count(group.progress, rank, 4)
    assert group.found_after(COLLECTIVE_LIMIT_S + 0.1, 0, 1) is None, "both compute"
    streams[0].num_passed = 4
    _await_count(group.progress, 0, 5)
    assert group.found_after(HANG_LIMIT_S + 0.1, 0, 1) == 1, "it has not come to the collective"
    streams[1].num_passed = 4
    _await_count(group.progress, 1, 5)
    assert group.found_after(COLLECTIVE_LIMIT_S + 0.1, 0, 1) == 0, "one of them hangs in it"
    streams[0].num_passed = streams[1].num_passed = 6
    for rank in range(2):
        _await_count(group.progress, rank, 8)
    assert len({*prepared} - {threading.get_ident()}) == 2


def test_ranks_compute_again_after_a_collective_that_has_failed(tmp_path: Path) -> None:
    progress = Progress(tmp_path, 1, create=True)

    def fail() -> None:
        with progress.collective(0):
            raise MemoryError

    with pytest.raises(MemoryError):
        fail()
    with progress.collective(0):
        assert progress.count(0) == 3
    assert progress.count(0) == 4
    with pytest.raises(MemoryError):
        fail()
    progress.advance(0)
    assert progress.count(0) % 2 == 0


def test_a_rank_is_not_late_for_the_time_that_all_were_in_a_slow_collective(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = Watched(tmp_path, 2, 2, monkeypatch)
    with group.progress.collective(0):
        with group.progress.collective(1):
            assert group.found_after(COLLECTIVE_LIMIT_S - 0.1, 0, 1) is None
        assert group.stragglers.find((0, 1)) is None, "it leaves last"
        group.now += COLLECTIVE_LIMIT_S  # as long as the others took in this step, and more than HANG_LIMIT_S
        assert group.stragglers.find((0, 1)) == 0


def test_a_rank_that_has_not_entered_the_collective_of_the_others_is_the_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = Watched(tmp_path, 2, 2, monkeypatch)
    with group.progress.collective(0):
        assert group.found_after(HANG_LIMIT_S + 0.1, 0, 1) == 1
    with group.progress.collective(1):
        assert group.found_after(HANG_LIMIT_S + 0.1, 0, 1) == 1, "it is the last to leave"


def test_a_rank_of_another_machine_has_the_time_of_its_heartbeats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = Watched(tmp_path, 2, 2, monkeypatch, num_local=1)
    assert group.found_after(HANG_LIMIT_S + 0.1, 1) is None
    assert group.found_after(REMOTE_LIMIT_S + 0.1, 1) == 1
    assert group.found_after(HANG_LIMIT_S + 0.1, 0) == 0


# -- preparations -----------------------------------------------------------------------------------------------------

READ, UNREAD = LoadedAdapter("a", None), LoadedAdapter("a", "gone")


def test_an_adapter_is_there_once_all_ranks_have_read_it() -> None:
    group = PreparedByAll(2)
    group.note(0, [READ, READ])
    assert group.take() == [], "the other rank has neither"
    group.note(1, [READ])
    assert group.take() == [READ]
    assert group.take() == []
    group.note(1, [READ])
    assert group.take() == [READ]


def test_an_adapter_that_one_rank_cannot_read_has_failed() -> None:
    group = PreparedByAll(2)
    group.note(0, [READ])
    group.note(1, [UNREAD])
    assert group.take() == [UNREAD]


def test_a_grammar_that_each_rank_refuses_in_its_own_words_is_replied_to() -> None:
    group = PreparedByAll(2)
    replies = [PreparedGrammar(Grammar("regex", "["), RequestFault(f"rank {rank}")) for rank in range(2)]
    for rank, reply in enumerate(replies):
        group.note(rank, [reply])
    assert group.take() == replies[:1]
