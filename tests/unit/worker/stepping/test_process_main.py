"""The engine process' end of its connection: it waits for a worker that does not read."""

import socket
import threading

from pagestream_worker.stepping import wire
from pagestream_worker.stepping.process_main import Connection
from pagestream_worker.stepping.reports import Ended

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
