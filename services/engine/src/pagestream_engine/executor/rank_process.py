"""One rank of a group, as the executor sees it: its process, and the answers that it has sent."""

from __future__ import annotations

import pickle
import socket
import struct
from collections import deque
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnContext
from os import dup
from pathlib import Path

from pagestream_engine.config import EngineConfig
from pagestream_engine.executor.base import ExecutorFacts, RunnerFactory
from pagestream_engine.executor.child import Failure
from pagestream_engine.executor.preparations import Prepared
from pagestream_engine.executor.rank_child import run_rank
from pagestream_engine.step.records import StepResult

Answer = ExecutorFacts | StepResult | Failure
_PIPE_LIMIT_S = 1
"""Of a pipe without progress, when a plan is sent or the rest of an answer received: a thread of the rank reads all the
time."""
_SECONDS = struct.Struct("ll")  # struct timeval


class RankProcess:
    """Starts a rank by `spawn`.

    Args:
        context: to start it in.
        make_runner: loads its part of the model; a function of a module.
        folder: the model's.
        config: settings, with the rank's place.
    """

    def __init__(
        self,
        context: SpawnContext,
        make_runner: RunnerFactory,
        folder: Path,
        config: EngineConfig,
    ) -> None:
        self.rank = config.place.rank
        self.answers: deque[Answer] = deque()
        """Received, and not taken."""
        self.prepared: list[Prepared] = []
        """Likewise."""
        self.connection, far = context.Pipe()
        self.has_ended = False
        """Whether its pipe has."""
        _limit(self.connection, _PIPE_LIMIT_S)
        arguments = (far, make_runner, folder, config)
        name = f"pagestream-rank-{self.rank}"
        self.process = context.Process(target=run_rank, args=arguments, name=name, daemon=True)
        self.process.start()
        far.close()

    def receive(self) -> None:
        """Receive an answer, or a preparation, that has come.

        Raises:
            EOFError: the process has closed its end.
            OSError: likewise, or it has stopped within the answer.
        """
        message = pickle.loads(self.connection.recv_bytes())  # noqa: S301 - from a process of our own
        if isinstance(message, Prepared):
            self.prepared.append(message)
        else:
            self.answers.append(message)

    def end(self, limit_s: float | None = None) -> None:
        """End the process: by the end of its pipe, and by SIGKILL if that has not ended it within the limit; None: by
        SIGKILL at once."""
        self.connection.close()
        if limit_s is not None:
            self.process.join(limit_s)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()


def _limit(connection: Connection, seconds: int) -> None:
    with socket.socket(fileno=dup(connection.fileno())) as end:
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            end.setsockopt(socket.SOL_SOCKET, option, _SECONDS.pack(seconds, 0))
