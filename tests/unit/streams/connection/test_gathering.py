"""Commands that come together share a round trip, and nothing else."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from pagestream_streams.connection.base import Command
from pagestream_streams.connection.gathering import Gathering
from redis.exceptions import ConnectionError as LostConnection
from redis.exceptions import ResponseError
from support.protocol.token_streams import eventually

LIMIT_S = 5.0


class Server:
    """Answers a command by its last word when it may; "wrong" by an error."""

    def __init__(self) -> None:
        self.sent: list[list[Command]] = []
        self.may_answer = asyncio.Event()
        self.is_lost = False
        self.turns = asyncio.Semaphore(100)
        self.gathering = Gathering(self.turns, 100, self.run_one, self.run_many)

    async def run_one(self, *command: Any) -> Any:
        [reply] = await self.run_many([command])
        if isinstance(reply, Exception):
            raise reply
        return reply

    async def run_many(self, commands: Sequence[Command]) -> list[Any]:
        for each in commands:
            str(each[-1]).encode()  # as packing does, before anything is sent
        self.sent.append(list(commands))
        await self.may_answer.wait()
        if self.is_lost:
            raise LostConnection("reset")
        return [ResponseError("a wrong command") if each[-1] == "wrong" else each[-1] for each in commands]

    def begin(self, *words: object) -> list[asyncio.Task[Any]]:
        return [asyncio.create_task(self.gathering.run(("ECHO", word))) for word in words]


@pytest.fixture
async def server() -> Server:
    return Server()


async def until_sent(server: Server, count: int) -> None:
    def is_sent() -> bool:
        return sum(map(len, server.sent)) == count

    await eventually(is_sent)


async def test_one_alone_is_sent_at_once_and_what_comes_meanwhile_together(server: Server) -> None:
    tasks = server.begin(*range(6))
    await until_sent(server, 6)
    assert [len(each) for each in server.sent] == [1, 5]
    server.may_answer.set()
    assert await asyncio.gather(*tasks) == list(range(6))
    assert await server.gathering.run(("ECHO", "later")) == "later"
    assert [len(each) for each in server.sent] == [1, 5, 1], "no round of the loop for one alone"


async def test_a_rush_takes_few_round_trips_beside_each_other(server: Server) -> None:
    tasks = server.begin(*range(1000))
    await until_sent(server, 1 + 8 * 64)
    assert [len(each) for each in server.sent] == [1] + [64] * 8
    server.may_answer.set()
    assert await asyncio.gather(*tasks) == list(range(1000))
    assert all(len(each) == 64 for each in server.sent[1:-1])


async def test_an_error_is_its_commands_own(server: Server) -> None:
    server.may_answer.set()
    found = await asyncio.gather(*server.begin(0, 1, "wrong", 3), return_exceptions=True)
    assert [found[0], found[1], found[3]] == [0, 1, 3]
    assert isinstance(found[2], ResponseError)


async def test_a_command_that_can_not_be_packed_is_an_error_of_its_own(server: Server) -> None:
    server.may_answer.set()
    found = await asyncio.gather(*server.begin(0, 1, "\ud800", 3), return_exceptions=True)
    assert [found[0], found[1], found[3]] == [0, 1, 3]
    assert isinstance(found[2], UnicodeEncodeError)


async def test_a_lost_connection_is_an_error_for_each_with_its_own_traceback(server: Server) -> None:
    tasks = server.begin(*range(4))
    await until_sent(server, 4)
    server.is_lost = True
    server.may_answer.set()
    found = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(each, LostConnection) and str(each) == "reset" for each in found)
    assert len({id(each) for each in found}) == len(found)
    server.is_lost = False
    assert await server.gathering.run(("ECHO", "again")) == "again"


async def test_who_is_cancelled_takes_nobody_along(server: Server) -> None:
    tasks = server.begin(*range(4))
    await until_sent(server, 4)
    for each in (tasks[0], tasks[2]):
        each.cancel()
    await asyncio.wait(tasks, timeout=0)
    server.may_answer.set()
    found = await asyncio.gather(*tasks, return_exceptions=True)
    assert [found[1], found[3]] == [1, 3]
    assert all(isinstance(found[each], asyncio.CancelledError) for each in (0, 2))


async def test_what_was_cancelled_before_it_was_sent_never_is(server: Server) -> None:
    """A server that was silent answers again: what nobody waits for is not done now, as it never was."""
    for _ in range(99):
        await server.turns.acquire()
    hung = server.begin("hung")
    await until_sent(server, 1)
    gone = server.begin(*range(600))
    await asyncio.sleep(0.01)
    for each in gone:
        each.cancel()
    await asyncio.wait(gone)
    kept = server.begin("kept")
    server.may_answer.set()
    assert await asyncio.gather(*hung, *kept) == ["hung", "kept"]
    assert server.sent == [[("ECHO", "hung")], [("ECHO", "kept")]]


@pytest.mark.parametrize("num_turns", [1, 2, 3, 4], ids="after turn {}".format)
async def test_stopping_ends_what_waits(server: Server, num_turns: int) -> None:
    first, *others = server.begin(*range(4))
    for _ in range(num_turns):  # waiting, or in a task that has not begun, or sent
        await asyncio.sleep(0)
    await server.gathering.stop()
    async with asyncio.timeout(LIMIT_S):
        found = await asyncio.gather(*others, return_exceptions=True)
    assert all(isinstance(each, LostConnection) for each in found)
    server.may_answer.set()
    assert await first == 0
    with pytest.raises(LostConnection):
        await server.gathering.run(("ECHO", "late"))


async def test_round_trips_that_hang_do_not_hold_others_up(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of connections that the network has lost; a new one answers."""
    monkeypatch.setattr("pagestream_streams.connection.gathering._SLOW_S", 0.05)
    hung = server.begin(*range(1 + 8 * 64))
    await until_sent(server, len(hung))
    late = server.begin("late")
    await until_sent(server, len(hung) + 1)
    assert server.sent[-1] == [("ECHO", "late")]
    server.may_answer.set()
    assert await asyncio.gather(*late) == ["late"]
    await asyncio.gather(*hung)


async def test_however_slow_they_are_round_trips_leave_half_of_the_turns(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagestream_streams.connection.gathering._SLOW_S", 0.0)
    monkeypatch.setattr("pagestream_streams.connection.gathering._MOST_TOGETHER", 1)
    tasks = server.begin(*range(200))
    await until_sent(server, 51)
    for _ in range(100):
        await asyncio.sleep(0)
    assert len(server.sent) == 51
    server.may_answer.set()
    assert await asyncio.gather(*tasks) == list(range(200))


async def test_a_round_trip_that_nobody_waits_for_gives_its_turn_back(server: Server) -> None:
    tasks = server.begin(*range(4))
    await until_sent(server, 4)
    held = server.turns._value
    for each in tasks[1:3]:
        each.cancel()
    await asyncio.wait(tasks[1:3])
    await asyncio.sleep(0)
    assert server.turns._value == held
    tasks[3].cancel()
    await asyncio.wait(tasks[3:])
    await eventually(lambda: server.turns._value == held + 1)
    server.may_answer.set()
    assert await tasks[0] == 0


async def test_large_commands_keep_nobody_waiting(server: Server) -> None:
    tasks = server.begin("first", "a" * 50_000, "b" * 50_000, "small", "c" * 200_000, "last")
    await until_sent(server, 6)
    assert [len(each) for each in server.sent] == [1, 1, 2, 1, 1]
    server.may_answer.set()
    await asyncio.gather(*tasks)
