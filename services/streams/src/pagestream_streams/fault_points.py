"""Fault points: where a test harness may kill, stop or cut off this process. Without the harness they do nothing.

With PAGESTREAM_FAULT_POINTS=PATH, the path of a Unix socket on which the harness listens, a process connects at its
first fault point, sends `hello PID`, and reads `arm NAME K` lines up to an `ok`. More may follow at any time. When it
reaches NAME for the K-th time from then on, it sends `at NAME` and blocks, with all its threads that reach a fault
point, until it reads `go`: the harness acts while the process is exactly there.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator, Sequence
from enum import StrEnum

from pagestream_streams.protocol.records import Append

VARIABLE = "PAGESTREAM_FAULT_POINTS"
IS_ON = VARIABLE in os.environ

_ANSWER_LIMIT_S = 120.0  # a harness that hangs must not block the process for ever
_GO = "go"
_OK = "ok"


class FaultPoint(StrEnum):
    """Every fault point, in the order of a request's life."""

    ACCEPTED = "accepted"
    """Gateway: the request is in Redis, its client does not know the id yet."""
    QUEUED = "queued"
    """Engine: it has room and is about to claim."""
    CLAIMED = "claimed"
    """Engine: requests are its own in Redis, and not scheduled yet."""
    PREFILL = "prefill"
    """Engine: a step with prompts, or with begun requests, is about to run."""
    FIRST_TOKEN = "first_token"  # noqa: S105 - a token of text
    """Engine: entry 0 of a log is about to be appended."""
    MIDDLE = "middle"
    """Engine: entries that follow others are about to be appended, without an end among them."""
    APPENDED = "appended"
    """Engine: entries are in their logs, and no gateway is woken yet."""
    FORWARDING = "forwarding"
    """Gateway: it has verified entries, and is about to write them to their client."""
    LAST_TOKEN = "last_token"  # noqa: S105 - a token of text
    """Engine: a choice's last token is generated, and not in the log yet."""
    FINISH = "finish"
    """Engine: the end of a log is about to be appended."""
    FINISHED = "finished"
    """Engine: the end of a log is appended; the engine still holds the request, and no gateway is woken yet."""


class Wire:
    """The connection to the harness."""

    def __init__(self, path: str) -> None:
        """Create it without connecting: the process may fork before its first fault point."""
        self._path = path
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._unread = b""
        self._armed: dict[str, int] = {}
        self._is_cut = False

    def reach(self, point: FaultPoint) -> None:
        """Block here if the harness armed this fault point and this is the passage it chose. May never return."""
        with self._lock:
            if self._is_cut:
                return
            try:
                self._take_orders()
                left = self._armed.get(point, 0) - 1
                if left > 0:
                    self._armed[point] = left
                elif left == 0:
                    del self._armed[point]
                    self._say(f"at {point}")
                    self._obey_until(_GO)
            except OSError:  # the harness has gone and will not send `go`
                self.close()

    def close(self) -> None:
        """Close the connection; from now on no fault point blocks."""
        self._is_cut = True
        if self._socket is not None:
            self._socket.close()

    def _take_orders(self) -> None:
        if self._socket is None:
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.settimeout(_ANSWER_LIMIT_S)
            self._socket.connect(self._path)
            self._say(f"hello {os.getpid()}")
            self._obey_until(_OK)
        self._socket.setblocking(False)
        try:
            for line in self._lines():
                self._obey(line)
        except BlockingIOError:
            pass
        finally:
            self._socket.settimeout(_ANSWER_LIMIT_S)

    def _obey_until(self, last: str) -> None:
        for line in self._lines():
            if line == last:
                return
            self._obey(line)

    def _obey(self, line: str) -> None:
        words = line.split()
        if words[0] == "arm":
            self._armed[words[1]] = int(words[2])
        elif words[0] == "disarm":
            self._armed.clear()

    def _lines(self) -> Iterator[str]:
        while True:
            line, found, rest = self._unread.partition(b"\n")
            if found:
                self._unread = rest
                yield line.decode()
                continue
            received = self._socket.recv(4096) if self._socket else b""
            if not received:
                raise ConnectionError("the harness has closed the connection")
            self._unread += received

    def _say(self, line: str) -> None:
        if self._socket is not None:
            self._socket.sendall(f"{line}\n".encode())


_wire = Wire(os.environ.get(VARIABLE, ""))


def reach(point: FaultPoint) -> None:
    """Pass a fault point."""
    if IS_ON:
        _wire.reach(point)


def before_append(appends: Sequence[Append]) -> None:
    """Pass the fault points before an append."""
    if IS_ON:
        if any(each.entries and each.first_index == 0 for each in appends):
            _wire.reach(FaultPoint.FIRST_TOKEN)
        if any(each.first_index > 0 and not each.ends for each in appends):
            _wire.reach(FaultPoint.MIDDLE)
        if any(each.ends for each in appends):
            _wire.reach(FaultPoint.FINISH)


def after_append(appends: Sequence[Append]) -> None:
    """Pass the fault points after an append."""
    if IS_ON:
        _wire.reach(FaultPoint.APPENDED)
        if any(each.ends for each in appends):
            _wire.reach(FaultPoint.FINISHED)
