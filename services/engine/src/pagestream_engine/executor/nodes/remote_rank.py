"""A rank of another machine, as the leader's executor sees it: the same as one of its own."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from threading import Lock
from time import monotonic, sleep

from pagestream_engine.executor.nodes.forming import Joined
from pagestream_engine.executor.nodes.link import BEAT_S, SILENCE_LIMIT_S, Link
from pagestream_engine.executor.rank_process import Answer
from pagestream_engine.wire.executor import ANSWERS, Prepared


class Wakeup:
    """Lets other threads wake one that waits for `end`, by `multiprocessing.connection.wait`."""

    def __init__(self) -> None:
        self.end, self._far = socket.socketpair()
        """Becomes readable."""
        for each in (self.end, self._far):
            each.setblocking(False)

    def set(self) -> None:
        """Wake the waiter; from any thread."""
        with suppress(OSError):  # full, so that the waiter is being woken already; or closed, so that there is none
            self._far.send(b"\0")

    def clear(self) -> None:
        """Take all wakings so far."""
        with suppress(BlockingIOError):
            while self.end.recv(4096):
                pass

    def close(self) -> None:
        """Release both ends."""
        self.end.close()
        self._far.close()


class RemoteRank:
    """Sends messages to a rank that has joined, and receives its answers.

    Args:
        joined: the rank, and its connection.
        note_count: called with the collectives that it has begun, with each heartbeat.
    """

    sentinel = None
    """Its process is another machine's: its end is that of the connection."""
    exit_code = None

    def __init__(self, joined: Joined, note_count: Callable[[int], None]) -> None:
        self.rank = joined.rank
        self.answers: deque[Answer] = deque()
        self.prepared: list[Prepared] = []
        self._wakeup = Wakeup()
        self.connection = self._wakeup.end
        self.has_ended = False
        self.end_reason = ""
        self._received: deque[Answer | Prepared] = deque()
        self._receiving = Lock()
        self._is_over = False
        self._link = Link(
            joined.end,
            joined.keys,
            on_message=self._take,
            on_end=self._note_end,
            on_beat=note_count,
        )
        self._link.start()

    def send(self, frame: bytearray) -> None:
        """Send a plan or a grammar; OSError where the connection has ended, or takes nothing."""
        self._link.send(frame)

    def note_loaded(self) -> None:
        """Note that the group has loaded; a connection that has ended says so when it is read."""
        with suppress(OSError):
            self._link.note_loaded()

    def receive(self) -> None:
        """Receive what has come.

        Raises:
            EOFError: the connection has ended, by `end_reason`.
        """
        self._wakeup.clear()
        with self._receiving:
            received, is_over = list(self._received), self._is_over
            self._received.clear()
        for message in received:
            if isinstance(message, Prepared):
                self.prepared.append(message)
            else:
                self.answers.append(message)
        if is_over:
            raise EOFError(self.end_reason)

    def is_cut_off(self) -> bool:
        """Return whether its machine has fallen silent. While heartbeats are missing, wait until it is known."""
        until = monotonic() + SILENCE_LIMIT_S
        while not self.end_reason and self._link.silence_s > 2 * BEAT_S and monotonic() < until:
            sleep(BEAT_S / 4)
        return self._link.is_cut_off

    def kill(self) -> None:
        """End the connection: the other machine then kills the rank."""
        self._link.close()

    def end(self, limit_s: float | None = None) -> None:
        """End the connection; with a limit orderly, so that the other machine's process exits without an error."""
        self._link.close(None if limit_s is None else "")
        self._wakeup.close()

    def join(self, limit_s: float) -> None:
        """Wait for nothing: the connection's end is all that can be seen."""

    def _take(self, body: bytes) -> None:
        message = ANSWERS.decode(body)
        with self._receiving:
            self._received.append(message)
        self._wakeup.set()

    def _note_end(self, reason: str) -> None:
        with self._receiving:
            self.end_reason, self._is_over = reason or "has ended", True
        self._wakeup.set()
