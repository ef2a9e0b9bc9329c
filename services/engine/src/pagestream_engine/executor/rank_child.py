"""A rank's process: an executor's process that exits at once when the pipe from its parent ends."""

from __future__ import annotations

import os
import threading
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue

from pagestream_engine.config import EngineConfig
from pagestream_engine.executor.base import RunnerFactory
from pagestream_engine.executor.child import run_child


def run_rank(
    connection: Connection, make_runner: RunnerFactory, folder: Path, config: EngineConfig, parent: int | None
) -> None:
    """Do `run_child` as the rank that `config.place` names. Exits the process."""
    run_child(RankPipe(connection), make_runner, folder, config, parent)


class RankPipe:
    """The rank's end of its pipe, read by a thread of its own.

    A step waits for other ranks, which may be dead or stopped: so the end of the pipe is noticed within steps, too, and
    ends the process. The parent has died then, or has given the group up.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._received: SimpleQueue[bytes] = SimpleQueue()
        threading.Thread(target=self._receive, name="plans", daemon=True).start()

    def recv_bytes(self) -> bytes:
        """Wait for the next message."""
        return self._received.get()

    def send_bytes(self, message: bytes) -> None:
        """Send a message; OSError where the other end has closed."""
        self._connection.send_bytes(message)

    def _receive(self) -> None:
        try:
            while True:
                self._received.put(self._connection.recv_bytes())
        except (EOFError, OSError):
            os._exit(0)
