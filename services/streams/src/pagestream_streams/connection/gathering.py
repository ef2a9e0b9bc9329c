"""Commands that tasks send at the same time share a round trip: one connection, one write, one wake-up of this process.

A command takes redis-py 75 us and more of processor time, most of it for taking a connection, a timer and a wake-up. In
a rush those are the same for all.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from itertools import islice
from typing import Any

from redis.exceptions import ConnectionError as LostConnection
from redis.exceptions import DataError

from pagestream_streams.connection.base import Command
from pagestream_streams.tasks import cancel

_MOST_TOGETHER = 64  # commands of a round trip
_LARGE_BYTES = 1 << 16  # of a round trip's arguments: whatever comes then has another one
_MOST_TRIPS = 8  # beside each other; what comes meanwhile gathers
_SLOW_S = 0.25
"""After which a round trip does not count among these: its connection may be dead, and others not."""

_CLOSED = "the connections are closed"

_Reply = asyncio.Future[Any]


class Gathering:
    """Runs commands: one alone at once, those that come meanwhile together, once a turn of the event loop.

    Who is cancelled no longer waits, and what has not been sent by then never is; a round trip for which nobody waits
    any more ends, with its connection. A lost or silent connection is an error for each command of its round trip.
    """

    def __init__(
        self,
        turns: asyncio.Semaphore,
        num_turns: int,
        run_one: Callable[..., Awaitable[Any]],
        run_many: Callable[[Sequence[Command]], Awaitable[Sequence[Any]]],
    ) -> None:
        """Create it.

        Args:
            turns: one is taken for each round trip.
            num_turns: as many as there are; half of them at most are taken, however slow round trips are.
            run_many: runs commands in one round trip; returns a reply or an exception for each.
        """
        self._turns = turns
        self._most_trips = max(_MOST_TRIPS, num_turns // 2)
        self._run_one = run_one
        self._run_many = run_many
        self._is_one_sent = False
        self._is_closed = False
        self._waiting: dict[_Reply, Command] = {}
        self._trips: dict[asyncio.Task[None], float] = {}
        """With when they began."""
        self._trip_of: dict[_Reply, asyncio.Task[None]] = {}
        self._looks_again: asyncio.TimerHandle | None = None

    async def run(self, command: Command) -> Any:
        """Return a command's reply, or raise its error."""
        if self._is_closed:
            raise LostConnection(_CLOSED)
        if not self._is_one_sent:
            self._is_one_sent = True
            try:
                async with self._turns:
                    return await self._run_one(*command)
            finally:
                self._is_one_sent = False
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_soon(self._send)
        reply: _Reply = loop.create_future()
        self._waiting[reply] = command
        try:
            return await reply
        finally:
            self._waiting.pop(reply, None)
            self._leave(reply)

    async def stop(self) -> None:
        """End the round trips in flight: their commands, and those that wait, are lost. It takes no more."""
        self._is_closed = True
        if self._looks_again is not None:
            self._looks_again.cancel()
        _fail(self._waiting, LostConnection(_CLOSED))
        for trip in list(self._trips):
            await cancel(trip)

    def _send(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        while self._waiting and len(self._trips) < self._most_trips and not self._is_closed:
            quick = [began for began in self._trips.values() if now - began < _SLOW_S]
            if len(quick) >= _MOST_TRIPS:
                if self._looks_again is None:
                    self._looks_again = loop.call_at(min(quick) + _SLOW_S, self._look_again)
                return
            together = self._next_together()
            trip = asyncio.create_task(self._take_turn(together))
            self._trips[trip] = now
            self._trip_of.update(dict.fromkeys(together, trip))
            trip.add_done_callback(partial(self._ended, together))

    def _look_again(self) -> None:
        self._looks_again = None
        self._send()

    def _next_together(self) -> dict[_Reply, Command]:
        """Return what goes in the next round trip, which waits no longer."""
        together, num_bytes = dict[_Reply, Command](), 0
        for reply, command in islice(self._waiting.items(), _MOST_TOGETHER):
            num_bytes += sum(len(each) for each in command if isinstance(each, bytes | str))
            if together and num_bytes > _LARGE_BYTES:
                break
            together[reply] = command
        for reply in together:
            del self._waiting[reply]
        return together

    def _leave(self, reply: _Reply) -> None:
        """End the round trip of a reply that is no longer waited for, unless another one's still is."""
        trip = self._trip_of.pop(reply, None)
        if trip is not None and reply.cancelled() and trip not in self._trip_of.values():
            trip.cancel()

    def _ended(self, together: Iterable[_Reply], trip: asyncio.Task[None]) -> None:
        del self._trips[trip]
        for reply in together:
            self._trip_of.pop(reply, None)
        _fail(together, LostConnection(_CLOSED) if trip.cancelled() else trip.exception())
        self._send()

    async def _take_turn(self, together: dict[_Reply, Command]) -> None:
        async with self._turns:
            wanted = {reply: command for reply, command in together.items() if not reply.done()}
            if not wanted:
                return
            answers = await self._run_together(list(wanted.values()))
        for reply, answer in zip(wanted, answers, strict=True):
            if reply.done():  # cancelled
                continue
            if isinstance(answer, Exception):
                own = copy.copy(answer)  # with a traceback of its own
                own.__cause__ = answer
                reply.set_exception(own)
            else:
                reply.set_result(answer)

    async def _run_together(self, commands: Sequence[Command]) -> Sequence[Any]:
        if len(commands) == 1:
            return [await self._run_alone(commands[0])]
        try:
            return await self._run_many(commands)
        except (DataError, UnicodeError):  # one of them can't be packed, and nothing was sent
            return [await self._run_alone(command) for command in commands]
        except Exception as error:  # noqa: BLE001 - it is raised where the commands are awaited
            return [error] * len(commands)

    async def _run_alone(self, command: Command) -> Any:
        try:
            return await self._run_one(*command)
        except Exception as error:  # noqa: BLE001 - likewise
            return error


def _fail(replies: Iterable[_Reply], error: BaseException | None) -> None:
    """Raise the error where it is awaited; None: all have their replies."""
    for reply in replies:
        if error is not None and not reply.done():
            reply.set_exception(error)
