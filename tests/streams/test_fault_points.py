import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from pagestream.v1.inference_pb2 import FINISH_REASON_STOP
from pagestream.v1.records_pb2 import LogEnd, LogEntry
from pagestream_streams import Append, fault_points
from pagestream_streams.fault_points import FaultPoint, Wire, reach
from pagestream_streams.protocol import to_entry_values
from support.processes.waiting import LIMIT_S


class Harness:
    """The other end of one process' line."""

    def __init__(self, path: Path) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._listener.settimeout(LIMIT_S)
        self._line: socket.socket | None = None
        self._read = b""

    def accept(self) -> str:
        self._line, _ = self._listener.accept()
        self._line.settimeout(LIMIT_S)
        return self.hear()

    def say(self, *lines: str) -> None:
        assert self._line is not None
        self._line.sendall("".join(f"{line}\n" for line in lines).encode())

    def hear(self) -> str:
        assert self._line is not None
        while b"\n" not in self._read:
            received = self._line.recv(4096)
            if not received:
                raise EOFError
            self._read += received
        line, _, self._read = self._read.partition(b"\n")
        return line.decode()

    def close(self) -> None:
        if self._line is not None:
            self._line.close()
        self._listener.close()


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[Harness]:
    with contextlib.closing(Harness(tmp_path / "socket")) as harness:
        yield harness


@pytest.fixture
def wire(tmp_path: Path) -> Iterator[Wire]:
    with contextlib.closing(Wire(str(tmp_path / "socket"))) as wire:
        yield wire


def in_thread(wire: Wire, *points: FaultPoint) -> threading.Thread:
    def pass_all() -> None:
        for point in points:
            wire.reach(point)

    thread = threading.Thread(target=pass_all, daemon=True)
    thread.start()
    return thread


def test_stands_still_at_the_passage_that_was_armed_until_told_to_go(harness: Harness, wire: Wire) -> None:
    middle, prefill = FaultPoint.MIDDLE, FaultPoint.PREFILL
    passing = in_thread(wire, middle, prefill, middle, middle)
    assert harness.accept() == f"hello {os.getpid()}"
    harness.say("arm middle 2", "ok")
    assert harness.hear() == "at middle"
    assert passing.is_alive()
    harness.say("go")
    passing.join(LIMIT_S)
    assert not passing.is_alive(), "the third passage must not stop: a moment is armed for once"


def test_other_threads_stop_at_their_next_moment_as_well(harness: Harness, wire: Wire) -> None:
    first = in_thread(wire, FaultPoint.PREFILL)
    harness.accept()
    harness.say("arm prefill 1", "ok")
    assert harness.hear() == "at prefill"
    second = in_thread(wire, FaultPoint.MIDDLE)
    second.join(0.2)
    assert second.is_alive()
    harness.say("go")
    for thread in (first, second):
        thread.join(LIMIT_S)
        assert not thread.is_alive()


def test_takes_orders_that_come_later(harness: Harness, wire: Wire) -> None:
    passing = in_thread(wire, FaultPoint.CLAIMED)
    harness.accept()
    harness.say("ok")
    passing.join(LIMIT_S)
    harness.say("arm claimed 1", "arm finish 1", "disarm", "arm claimed 1")
    passing = in_thread(wire, FaultPoint.FINISH, FaultPoint.CLAIMED)
    assert harness.hear() == "at claimed"
    harness.say("go")
    passing.join(LIMIT_S)


def test_goes_on_when_the_harness_is_gone(harness: Harness, wire: Wire) -> None:
    passing = in_thread(wire, FaultPoint.CLAIMED, FaultPoint.CLAIMED)
    harness.accept()
    harness.say("arm claimed 1", "ok")
    harness.hear()
    harness.close()
    passing.join(LIMIT_S)
    assert not passing.is_alive()


def test_an_append_passes_each_moment_that_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    passed: list[str] = []
    monkeypatch.setattr(fault_points, "IS_ON", True)
    monkeypatch.setattr(Wire, "reach", lambda self, point: passed.append(point))
    first, middle = appending(0, LogEntry(token_id=1)), appending(3, LogEntry(token_id=1))
    last = appending(4, LogEntry(end=LogEnd(reason=FINISH_REASON_STOP)))
    for appends in ([first], [middle], [last], [first, middle, last]):
        fault_points.before_append(appends)
        fault_points.after_append(appends)
    assert passed == [
        *("first_token", "appended", "middle", "appended", "finish", "appended", "finished"),
        *("first_token", "middle", "finish", "appended", "finished"),
    ]


def appending(first_index: int, entry: LogEntry) -> Append:
    return Append(
        request_id="r",
        epoch=1,
        nonce="n",
        first_index=first_index,
        entries=[to_entry_values(entry)],
        previous_digest="",
    )


def test_cost_nothing_in_a_process_that_was_not_started_for_them() -> None:
    """One comparison: no other function runs, in Python or in C, and no connection is open."""
    assert not fault_points.IS_ON
    calls: list[str] = []

    def watch(frame: object, event: str, argument: object) -> None:
        calls.append(event)

    sys.setprofile(watch)
    try:
        reach(FaultPoint.MIDDLE)
        fault_points.before_append([])
        fault_points.after_append([])
    finally:
        sys.setprofile(None)
    # Three calls, three returns, and the call of setprofile itself.
    assert calls == ["call", "return"] * 3 + ["c_call"]


def test_are_switched_on_by_the_environment_alone() -> None:
    program = "from pagestream_streams import fault_points; print(fault_points.IS_ON)"
    environment = {**os.environ, fault_points.VARIABLE: "/nowhere"}
    for environ, said in ((environment, "True"), (dict(os.environ), "False")):
        ran = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=True)
        assert ran.stdout.strip() == said
