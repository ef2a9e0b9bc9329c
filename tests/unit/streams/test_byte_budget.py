"""A byte budget: never more held than its limit, no waiter is overtaken, none waits beside room."""

import asyncio
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pagestream_streams.byte_budget import ByteBudget

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
            self.waiters.append(Waiter(size, asyncio.get_running_loop().create_task(self.budget.take(size))))
        elif verb == "give" and holders:
            holder = holders[size % len(holders)]
            self.waiters.remove(holder)
            self.budget.give(holder.size)
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
                    assert not room.budget.try_take(0), "it would be overtaken"
        for each in room.waiters:
            each.task.cancel()
        await asyncio.gather(*(each.task for each in room.waiters), return_exceptions=True)

    asyncio.run(run())


async def test_more_than_the_limit_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="limit is 10"):
        await ByteBudget(LIMIT).take(LIMIT + 1)
