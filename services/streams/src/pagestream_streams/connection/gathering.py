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
_MOST_TRIPS = 8  # beside each other; what comes meanwhile gathers

_CLOSED = "the connections are closed"

_Reply = asyncio.Future[Any]


class Gathering:
    """Runs commands: one alone at once, those that come meanwhile together, once a turn of the event loop.

    Who is cancelled no longer waits, and what has not been sent by then never is. A lost or silent connection is an
    error for each command of its round trip.
    """

    def __init__(
        self,
        turns: asyncio.Semaphore,
        run_one: Callable[..., Awaitable[Any]],
        run_many: Callable[[Sequence[Command]], Awaitable[Sequence[Any]]],
    ) -> None:
        """Create it.

        Args:
            turns: one is taken for each round trip.
            run_one: runs a command.
            run_many: runs commands in one round trip; returns a reply or an exception for each.
        """
        self._turns = turns
        self._run_one = run_one
        self._run_many = run_many
        self._is_one_sent = False
        self._is_closed = False
        self._waiting: dict[_Reply, Command] = {}
        self._trips: set[asyncio.Task[None]] = set()

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

    async def stop(self) -> None:
        """End the round trips in flight: their commands, and those that wait, are lost. It takes no more."""
        self._is_closed = True
        _fail(self._waiting, LostConnection(_CLOSED))
        for trip in list(self._trips):
            await cancel(trip)

    def _send(self) -> None:
        while self._waiting and len(self._trips) < _MOST_TRIPS and not self._is_closed:
            together = dict(islice(self._waiting.items(), _MOST_TOGETHER))
            for reply in together:
                del self._waiting[reply]
            trip = asyncio.create_task(self._take_turn(together))
            self._trips.add(trip)
            trip.add_done_callback(partial(self._ended, together))

    def _ended(self, together: Iterable[_Reply], trip: asyncio.Task[None]) -> None:
        self._trips.discard(trip)
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
