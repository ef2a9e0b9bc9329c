"""Processes below a worker that are hit alone: its engine, the engine's executor, one of its ranks."""

from __future__ import annotations

import signal
from pathlib import Path

from support.processes.fork_server import ForkedPart, send_signal
from support.processes.part import Part, StackError
from support.processes.waiting import children_of


class EnginePart(Part):
    """The process of an engine alone, apart from its worker, which ends with it and is started again."""

    what = "engine"

    def __init__(self, worker: ForkedPart) -> None:
        super().__init__(f"{worker.name}'s {self.what}", worker.command, worker.log)
        self._worker = worker

    def signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        send_signal(self.pids(), number)

    def pids(self) -> list[int]:
        """Return the processes that are signalled."""
        return children_of(self._worker.pid)

    @property
    def worker_name(self) -> str:
        """Name of the worker that the engine belongs to."""
        return self._worker.name

    def is_worker_alive(self) -> bool:
        """Whether the worker runs."""
        return self._worker.is_alive()

    def wait(self) -> int:
        """Wait for the worker's end."""
        return self._worker.wait()

    def start(self) -> None:
        """Start the worker."""
        self._worker.start()


class ExecutorPart(EnginePart):
    """The process of an engine's executor alone, apart from the engine, which ends with it, and its worker."""

    what = "executor"

    def pids(self) -> list[int]:
        """Return the processes that are signalled."""
        found = [pid for engine in super().pids() for pid in children_of(engine)]
        if not found:
            raise StackError(f"{self.name}: there is no process of an executor")
        return found


class RankPart(EnginePart):
    """The last of an engine's ranks alone: the others, the engine and its worker end with it."""

    what = "rank"

    def pids(self) -> list[int]:
        """Return the process that is signalled."""
        found = [pid for engine in super().pids() for pid in children_of(engine)]
        ranks = [pid for pid in found if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        if len(ranks) < 2:
            raise StackError(f"{self.name}: there are {len(ranks)} ranks")
        return ranks[-1:]
