"""Periodic work, cancellations, turns and byte budgets: what the asynchronous parts share."""

import asyncio
import itertools
from contextlib import suppress
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pagestream_streams import Unavailable
from pagestream_streams.tasks import ByteBudget, Periodic, Turns, cancel, raise_if_cancelled
from support.processes.waiting import LIMIT_S


async def test_rounds_go_on_after_every_kind_of_failure(caplog: pytest.LogCaptureFixture) -> None:
    rounds, done = list[int](), asyncio.Event()

    async def work() -> None:
        rounds.append(len(rounds))
        if len(rounds) == 1:
            raise Unavailable("away")
        if len(rounds) == 2:
            raise KeyError("bug")
        done.set()

    timer = Periodic("test", 0.001, work)
    timer.start()
    await asyncio.wait_for(done.wait(), LIMIT_S)
    await timer.stop()
    assert "test failed" in caplog.text
    count = len(rounds)
    await asyncio.sleep(0)
    assert len(rounds) == count


class Panic(BaseException):
    """What a library in Rust raises: no Exception."""


async def test_rounds_go_on_after_a_cancellation_from_inside_and_a_panic(caplog: pytest.LogCaptureFixture) -> None:
    rounds, done = list[int](), asyncio.Event()

    async def work() -> None:
        rounds.append(len(rounds))
        if len(rounds) == 1:
            other = asyncio.create_task(asyncio.sleep(10_000))
            asyncio.get_running_loop().call_soon(other.cancel)
            await other
        if len(rounds) == 2:
            raise Panic("index out of bounds")
        done.set()

    timer = Periodic("test", 0.001, work)
    timer.start()
    await asyncio.wait_for(done.wait(), LIMIT_S)
    await timer.stop()
    assert "cancelled from inside" in caplog.text
    assert "index out of bounds" in caplog.text


async def test_nudge_begins_a_round_now() -> None:
    rounds = asyncio.Semaphore(0)

    async def work() -> None:
        rounds.release()

    timer = Periodic("test", 10_000, work)
    timer.start()
    await asyncio.wait_for(rounds.acquire(), LIMIT_S)
    timer.nudge()
    await asyncio.wait_for(rounds.acquire(), LIMIT_S)
    await timer.stop()
    await timer.stop()


async def test_cancel_repeats_what_was_lost() -> None:
    lost = []

    async def forgetful() -> None:
        try:
            await asyncio.sleep(10_000)
        except asyncio.CancelledError as error:
            lost.append(error)
        await asyncio.sleep(10_000)

    task = asyncio.create_task(forgetful())
    await asyncio.sleep(0)
    await asyncio.wait_for(cancel(task), LIMIT_S)
    assert task.cancelled()
    assert len(lost) == 1


async def test_a_cancellation_that_a_library_took_is_heeded_later() -> None:
    begun = asyncio.Event()

    async def library() -> None:
        begun.set()
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()

    async def work() -> None:
        raise_if_cancelled()
        await library()
        raise_if_cancelled()
        await asyncio.Event().wait()

    task = asyncio.create_task(work())
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, LIMIT_S)


async def test_a_thousand_ready_tasks_leave_room_for_others_between_them() -> None:
    """One goes on in each round of the loop, in order; those that were cancelled cost no round."""
    turns = Turns()
    log: list[int] = []

    async def take(number: int) -> None:
        await turns.wait()
        log.append(number)

    async def other() -> None:
        while True:
            log.append(-1)
            await asyncio.sleep(0)

    tasks = [asyncio.create_task(take(number)) for number in range(40)]
    watcher = asyncio.create_task(other())
    await asyncio.sleep(0)
    for number in range(20, 30):
        tasks[number].cancel()
    async with asyncio.timeout(LIMIT_S):
        await asyncio.gather(*tasks, return_exceptions=True)
    await cancel(watcher)
    assert [number for number in log if number >= 0] == [*range(20), *range(30, 40)]
    assert all(-1 in (one, other) for one, other in itertools.pairwise(log)), "two went on in one round"
    async with asyncio.timeout(LIMIT_S):
        await turns.wait()


# -- A byte budget: never more held than its limit, no waiter is overtaken, none waits beside room.


LIMIT = 10


@dataclass
class Waiter:
    size: int
    task: asyncio.Task[None]


@dataclass
class Room:
    """Tasks that take and give in any order, and are cancelled at any moment."""

    budget: ByteBudget = field(default_factory=lambda: ByteBudget(LIMIT))
    waiters: list[Waiter] = field(default_factory=list)

    def act(self, verb: str, size: int) -> None:
        holders = [each for each in self.waiters if each.task.done()]
        if verb == "take":
            self.waiters.append(Waiter(size, asyncio.get_running_loop().create_task(self.budget.acquire(size))))
        elif verb == "give" and holders:
            holder = holders[size % len(holders)]
            self.waiters.remove(holder)
            self.budget.release(holder.size)
        elif verb == "cancel" and len(self.waiters) > len(holders):
            waiting = [each for each in self.waiters if not each.task.done()]
            victim = waiting[size % len(waiting)]
            self.waiters.remove(victim)
            victim.task.cancel()


@given(st.lists(st.tuples(st.sampled_from(["take", "take", "give", "cancel", "settle"]), st.integers(1, LIMIT))))
def test_any_order_of_takers(steps: list[tuple[str, int]]) -> None:
    async def run() -> None:
        room = Room()
        for verb, size in steps:
            room.act(verb, size)
            if verb == "settle":
                for _ in range(3):
                    await asyncio.sleep(0)
                holding = [each for each in room.waiters if each.task.done()]
                waiting = [each for each in room.waiters if not each.task.done()]
                assert room.budget.held_bytes == sum(each.size for each in holding) <= LIMIT
                if waiting:
                    assert room.budget.held_bytes + waiting[0].size > LIMIT, "it waits beside room"
                    assert not room.budget.try_acquire(0), "it would be overtaken"
        for each in room.waiters:
            each.task.cancel()
        await asyncio.gather(*(each.task for each in room.waiters), return_exceptions=True)

    asyncio.run(run())


async def test_more_than_the_limit_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="limit is 10"):
        await ByteBudget(LIMIT).acquire(LIMIT + 1)
