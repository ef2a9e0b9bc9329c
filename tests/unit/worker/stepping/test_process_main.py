"""The engine process' end of its connection: it waits for a worker that does not read."""

import socket
import threading

import pytest
from pagestream_engine.config import EngineConfig
from pagestream_worker.stepping import process_main, wire
from pagestream_worker.stepping.process_main import Commands, Connection
from pagestream_worker.stepping.reports import Ended, ModelInspected
from pagestream_worker.stepping.step_loop import CommandQueue

LIMIT_S = 10.0
NUM_REPORTS = 200


def test_reports_wait_while_the_worker_does_not_read() -> None:
    ours, theirs = socket.socketpair()
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16384)
    connection, report, sent = Connection(theirs), Ended("x" * 1000), []

    def send() -> None:
        for number in range(NUM_REPORTS):
            connection.report(report)
            sent.append(number)

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    thread.join(0.2)
    assert thread.is_alive()
    assert len(sent) < NUM_REPORTS
    frames, received = wire.Frames(), 0
    while received < NUM_REPORTS:
        received += sum(wire.unpack(body) == report for body in frames.feed(ours.recv(1 << 16)))
    thread.join(LIMIT_S)
    assert not thread.is_alive()
    ours.close()
    theirs.close()


def test_what_is_sent_at_once_is_read_one_by_one() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(wire.pack(["a"]) + wire.pack("b"))
        connection = Connection(theirs)
        assert [connection.read(), connection.read()] == [["a"], "b"]


def test_a_model_whose_storage_hangs_holds_up_no_command(monkeypatch: pytest.MonkeyPatch) -> None:
    is_read = threading.Event()

    def inspect(source: str, config: EngineConfig, *, is_deterministic: bool) -> ModelInspected:
        if source == "slow":
            is_read.wait(LIMIT_S)
        return ModelInspected(source, None, "")

    monkeypatch.setattr(process_main, "inspect_model", inspect)
    ours, theirs = socket.socketpair()
    frames = wire.Frames()
    commands = Commands(Connection(theirs), CommandQueue(), None, EngineConfig.from_options({}))
    for source in ("slow", "fast"):
        commands._inspect(source)
    ours.settimeout(LIMIT_S)
    answers = []
    for _ in range(2):
        while not (bodies := frames.feed(ours.recv(1 << 16))):
            pass
        answers += [wire.unpack(body).source for body in bodies]
        is_read.set()
    assert answers == ["fast", "slow"]
    ours.close()
    theirs.close()
