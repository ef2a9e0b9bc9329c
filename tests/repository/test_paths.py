"""What counts as entered for nothing, and what of the records of processes belongs to a path."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
from paths import BEGIN, END, Call, Function, Process, chats, for_nothing, only_tests, steps, written

SOURCE = '''\
def looks(self):
    """Return what has come."""
    if not self.rows:
        return []
    self.rows.pop()
    return self.rows

def walks(self):
    for row in self.rows:
        row.free = True

def empties(self):
    taken, self.new = self.new, []
    return taken

def reads(self):
    return self.size

def counts(self):
    self.count += 1
    if self.rows:
        self.free()

def calls(self):
    self.free()

async def waits(self):
    if self.rows:
        return
    await self.ready

def does_nothing(self):
    """Pass."""
'''


@pytest.mark.parametrize(
    ("first_line", "lines", "expected"),
    [
        (1, (3, 4), True),
        (1, (3, 5, 6), False),
        (8, (9,), True),
        (8, (9, 10), False),
        (12, (13, 14), True),
        (16, (17,), False),  # reads a number that is 0: no test
        (19, (20, 21), False),
        (24, (25,), False),
        (27, (28, 29), True),
        (27, (28, 30), False),
        (32, (33,), True),
    ],
)
def test_the_lines_that_ran_say_whether_there_was_nothing_to_do(
    tmp_path: Path, first_line: int, lines: tuple[int, ...], expected: bool
) -> None:
    file = tmp_path / "source.py"
    file.write_text(SOURCE)
    assert only_tests(str(file), first_line, lines) is expected


def test_a_call_is_for_nothing_only_with_all_that_it_calls() -> None:
    calls = [(0, True), (1, True), (2, False), (1, True), (0, True), (1, True), (0, False)]
    assert for_nothing(calls) == [False, False, False, True, True, True, False]


def _call(name: str, start: int, end: int, depth: int = 0) -> Call:
    return Call(start, end, depth, Function("a.py", name, 1), name == "idle")


def test_a_step_ends_with_its_report_and_counts_its_executor() -> None:
    thread = [_call("Engine.step", 0, 10), _call("a", 2, 3, 1), _call("report", 11, 12), _call("late", 15, 16)]
    thread += [_call("Engine.step", 20, 30), _call("Engine.step", 40, 50)]  # nothing was sent after the second
    other = [_call("reads commands", 4, 5)]
    engine = Process(7, "engine", 1, [thread, other], [[5, 12], [6]])
    executor = Process(8, "executor", 7, [[_call("runs", 5, 6), _call("runs on", 13, 14)]], [[]])
    [step] = steps([engine, executor])
    assert {call.function.name for call in step} == {"Engine.step", "a", "report", "runs"}


def test_a_chat_has_what_most_chats_have_and_idle_times_have_not() -> None:
    times = [(100 * n + 50, 100 * n + 90) for n in range(3)]
    answers = [_call("answers", start + 1, start + 5) for start, _ in times]
    asks = [
        each
        for start, _ in times
        for each in (_call("idle", start + 6, start + 7, 1), _call("b", start + 8, start + 9))
    ]
    beats = [_call("beats", at, at + 1) for at in range(20, 300, 20)]
    rare = [_call("rare", 160, 161)]
    calls = sorted([*answers, *asks, *beats, *rare])
    crossed = chats([Process(1, "gateway", 0, [calls], [[]])], times)
    assert {each.name for each in crossed["gateway"].functions} == {"answers", "idle", "b"}
    assert {each.name for each in crossed["gateway"].for_nothing} == {"idle"}
    assert crossed["all"] == crossed["gateway"]


def test_the_table_is_written_between_its_markers() -> None:
    page = f"before\n{BEGIN}\n\nold\n\n{END}\nafter\n"
    assert written(page, "new") == f"before\n{BEGIN}\n\nnew\n\n{END}\nafter\n"
    with pytest.raises(SystemExit, match="expected"):
        written("before", "new")
