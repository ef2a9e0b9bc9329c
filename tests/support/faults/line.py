"""The harness' end of fault points: arms moments in processes, and hears when one stands still at its moment."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from pagestream_streams.fault_points import FaultPoint

_POLL_S = 0.005


@dataclass(frozen=True)
class Stop:
    """A process that stands still."""

    pid: int
    point: FaultPoint


class FaultLine:
    """Listens on a Unix socket; used as `async with FaultLine(path) as line`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.stops: asyncio.Queue[Stop] = asyncio.Queue()
        self._server: asyncio.Server | None = None
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._orders: dict[FaultPoint, int] = {}
        self._armed: frozenset[int] | None = None  # only these processes; None: all

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_unix_server(self._serve, str(self.path))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def arm(self, orders: Mapping[FaultPoint, int], pids: Collection[int] | None = None) -> None:
        """Have processes stand still at their n-th passage of a moment from now on; those that start later as well."""
        self._orders = dict(orders)
        self._armed = None if pids is None else frozenset(pids)
        for pid in self._writers:
            self._tell(pid, self._orders_for(pid))

    def disarm(self) -> None:
        """Nobody who is not standing already will. Forgets who stood."""
        self._orders = {}
        for pid in self._writers:
            self._tell(pid, "disarm\n")

    def go(self, pid: int) -> None:
        """Let a process pass, if it is there."""
        self._tell(pid, "go\n")

    async def stop(self, limit_s: float) -> Stop:
        """The next process that stands still. TimeoutError that says who could have.

        Asks again and again: nobody who waited before can keep a stop for himself.
        """
        end = time.monotonic() + limit_s
        while self.stops.empty():
            if time.monotonic() > end:
                known = sorted(self._writers)
                raise TimeoutError(f"nobody stood still for {limit_s:g} s; orders {self._orders}, processes {known}")
            await asyncio.sleep(_POLL_S)
        return self.stops.get_nowait()

    def waiting(self) -> list[Stop]:
        """Processes that stand still and that nobody has asked for."""
        found = []
        with suppress(asyncio.QueueEmpty):
            while True:
                found.append(self.stops.get_nowait())
        return found

    def _orders_for(self, pid: int) -> str:
        if self._armed is not None and pid not in self._armed:
            return ""
        return "".join(f"arm {point} {count}\n" for point, count in self._orders.items())

    def _tell(self, pid: int, text: str) -> None:
        writer = self._writers.get(pid)
        if writer is not None and text:
            writer.write(text.encode())

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        pid, task = 0, asyncio.current_task()
        if task is not None:
            self._tasks.add(task)
        try:
            while line := (await reader.readline()).decode().split():
                if line[0] == "hello":
                    pid = int(line[1])
                    self._writers[pid] = writer
                    self._tell(pid, f"{self._orders_for(pid)}ok\n")
                elif not self._orders:  # it stopped before it heard that nobody wants it to
                    self.go(pid)
                else:
                    self.stops.put_nowait(Stop(pid, FaultPoint(line[1])))
        except (ConnectionError, asyncio.CancelledError):
            pass  # the process was killed, or the harness is closing
        finally:
            self._writers.pop(pid, None)
            writer.close()
            if task is not None:
                self._tasks.discard(task)
