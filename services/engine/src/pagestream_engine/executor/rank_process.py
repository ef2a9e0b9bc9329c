"""One rank of a group, as the executor sees it: what it is sent, and the answers that it has sent."""

from __future__ import annotations

import socket
import struct
from collections import deque
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnContext
from os import dup
from pathlib import Path
from typing import Protocol

from pagestream_engine.config import EngineConfig
from pagestream_engine.executor.base import RunnerFactory
from pagestream_engine.executor.child import bonding_parent, run_rank
from pagestream_engine.plan import StepResult
from pagestream_engine.wire.executor import ANSWERS, ExecutorFacts, Failure, Prepared

Answer = ExecutorFacts | StepResult | Failure
_PIPE_LIMIT_S = 1
"""Of a pipe without progress, when a plan is sent or the rest of an answer received: a thread of the rank reads all the
time."""
_SECONDS = struct.Struct("ll")  # struct timeval


class Rank(Protocol):
    """A rank of this machine or of another one."""

    rank: int
    answers: deque[Answer]
    """Received, and not taken."""
    prepared: list[Prepared]
    """Likewise."""
    has_ended: bool
    """Whether its connection was seen to end."""

    @property
    def connection(self) -> Connection | socket.socket:
        """Is readable when something can be received."""
        ...

    @property
    def sentinel(self) -> int | None:
        """Is readable when its process has died; None for one of another machine."""
        ...

    @property
    def exit_code(self) -> int | None:
        """Of its process; None while it runs, and for one of another machine."""
        ...

    @property
    def end_reason(self) -> str:
        """How it ended; empty while it has not."""
        ...

    def is_cut_off(self) -> bool:
        """Whether it is another machine's, and nothing comes from there any more; may take a second."""
        ...

    def send(self, frame: bytearray) -> None:
        """Send a plan or a grammar; OSError where it takes none."""
        ...

    def note_loaded(self) -> None:
        """Note that all ranks have loaded: a lost machine is noticed sooner from now on."""
        ...

    def receive(self) -> None:
        """Receive what has come; EOFError or OSError where its connection has ended."""
        ...

    def join(self, limit_s: float) -> None:
        """Wait for the process's exit code, where there is one."""
        ...

    def kill(self) -> None:
        """End it at once, without waiting."""
        ...

    def end(self, limit_s: float | None = None) -> None:
        """End it, orderly within the limit; None: at once."""
        ...


class RankProcess:
    """Starts a rank by `spawn`.

    Args:
        make_runner: loads its part of the model; a function of a module.
        config: settings, with the rank.
    """

    def __init__(
        self,
        context: SpawnContext,
        make_runner: RunnerFactory,
        folder: Path,
        config: EngineConfig,
    ) -> None:
        self.rank = config.rank.index
        self.answers: deque[Answer] = deque()
        """Received, and not taken."""
        self.prepared: list[Prepared] = []
        """Likewise."""
        self.connection, far = context.Pipe()
        self.has_ended = False
        """Whether its pipe has."""
        _limit(self.connection, _PIPE_LIMIT_S)
        # Pickled, as those of a ProcessExecutor, and never from another machine.
        arguments = (far, make_runner, folder, config, bonding_parent(context))
        name = f"pagestream-rank-{self.rank}"
        self.process = context.Process(target=run_rank, args=arguments, name=name, daemon=True)
        self.process.start()
        far.close()

    @property
    def sentinel(self) -> int:
        """Is readable when the process has died."""
        return self.process.sentinel

    @property
    def exit_code(self) -> int | None:
        """Of the process; minus the number of the signal that killed it."""
        return self.process.exitcode

    @property
    def end_reason(self) -> str:
        """How the process ended; empty while it runs."""
        code = self.process.exitcode
        if code is None:
            return ""
        return f"was killed by signal {-code}" if code < 0 else f"exited: {code}"

    def is_cut_off(self) -> bool:
        """Return False: it is on this machine."""
        return False

    def send(self, frame: bytearray) -> None:
        """Send a plan or a grammar; OSError where the pipe has ended, or takes nothing for its limit."""
        self.connection.send_bytes(frame)

    def note_loaded(self) -> None:
        """Do nothing: its process is watched from the start."""

    def join(self, limit_s: float) -> None:
        """Wait for the process's end."""
        self.process.join(limit_s)

    def kill(self) -> None:
        """Kill the process, and close its pipe."""
        self.process.kill()
        self.connection.close()

    def receive(self) -> None:
        """Receive an answer, or a preparation, that has come.

        Raises:
            EOFError: the process has closed its end.
            OSError: likewise, or it has stopped within the answer.
            MessageError: what has come is no answer.
        """
        message = ANSWERS.decode(self.connection.recv_bytes(ANSWERS.max_bytes))
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
