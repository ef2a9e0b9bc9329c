"""The harness' side of fault points: arms them in processes, and receives which process is paused at which one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pagestream_streams.fault_points import FaultPoint
from support.network.proxy import ConnectionServer

_POLL_S = 0.005


@dataclass(frozen=True)
class Pause:
    """A process that is paused at a fault point."""

    pid: int
    point: FaultPoint


class FaultPointController(ConnectionServer):
    """Listens on a Unix socket to which processes connect."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self._pauses: asyncio.Queue[Pause] = asyncio.Queue()
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._orders: dict[FaultPoint, int] = {}
        self._armed: frozenset[int] | None = None  # only these processes; None: all

    async def _listen(self) -> asyncio.Server:
        return await asyncio.start_unix_server(self._accept, str(self.path))

    def arm(self, orders: Mapping[FaultPoint, int], pids: Collection[int] | None = None) -> None:
        """Pause processes at their n-th passage of a point from now on; processes that start later as well."""
        self._orders = dict(orders)
        self._armed = None if pids is None else frozenset(pids)
        for pid in self._writers:
            self._send(pid, self._orders_for(pid))

    def disarm(self) -> None:
        """Pause no further process; those that are paused stay so."""
        self._orders = {}
        for pid in self._writers:
            self._send(pid, "disarm\n")

    def resume(self, pid: int) -> None:
        """Let a process continue, if it is connected."""
        self._send(pid, "go\n")

    async def next_pause(self, limit_s: float) -> Pause:
        """Wait for the next process that pauses. TimeoutError names the armed points and the connected processes.

        It polls: a waiter that was cancelled in `Queue.get` could have taken a pause with it.
        """
        end = time.monotonic() + limit_s
        while self._pauses.empty():
            if time.monotonic() > end:
                known = sorted(self._writers)
                raise TimeoutError(f"no process paused within {limit_s:g} s; armed: {self._orders}, processes: {known}")
            await asyncio.sleep(_POLL_S)
        return self._pauses.get_nowait()

    def take_pauses(self) -> list[Pause]:
        """Return the paused processes that `next_pause` has not returned yet."""
        found = []
        with suppress(asyncio.QueueEmpty):
            while True:
                found.append(self._pauses.get_nowait())
        return found

    def _orders_for(self, pid: int) -> str:
        if self._armed is not None and pid not in self._armed:
            return ""
        return "".join(f"arm {point} {count}\n" for point, count in self._orders.items())

    def _send(self, pid: int, text: str) -> None:
        writer = self._writers.get(pid)
        if writer is not None and text:
            writer.write(text.encode())

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        pid = 0
        try:
            while line := (await reader.readline()).decode().split():
                if line[0] == "hello":
                    pid = int(line[1])
                    self._writers[pid] = writer
                    self._send(pid, f"{self._orders_for(pid)}ok\n")
                elif not self._orders:  # it paused before it received the disarming
                    self.resume(pid)
                else:
                    self._pauses.put_nowait(Pause(pid, FaultPoint(line[1])))
        finally:
            self._writers.pop(pid, None)
