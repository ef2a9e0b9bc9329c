import asyncio
import itertools
from contextlib import suppress

import pytest
from pagestream_streams.errors import Unavailable
from pagestream_streams.tasks import Periodic, Turns, cancel, raise_if_cancelled


async def test_rounds_go_on_after_every_kind_of_failure(caplog: pytest.LogCaptureFixture) -> None:
    rounds, done = [], asyncio.Event()

    async def work() -> None:
        rounds.append(len(rounds))
        if len(rounds) == 1:
            raise Unavailable("away")
        if len(rounds) == 2:
            raise KeyError("bug")
        done.set()

    timer = Periodic("test", 0.001, work)
    timer.start()
    await asyncio.wait_for(done.wait(), 10)
    await timer.stop()
    assert "test failed" in caplog.text
    count = len(rounds)
    await asyncio.sleep(0)
    assert len(rounds) == count


async def test_nudge_begins_a_round_now() -> None:
    rounds = asyncio.Semaphore(0)

    async def work() -> None:
        rounds.release()

    timer = Periodic("test", 10_000, work)
    timer.start()
    await asyncio.wait_for(rounds.acquire(), 10)
    timer.nudge()
    await asyncio.wait_for(rounds.acquire(), 10)
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
    await asyncio.wait_for(cancel(task), 20)
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
        await asyncio.wait_for(task, 10)


async def test_a_thousand_ready_tasks_leave_room_for_others_between_them() -> None:
    """One goes on in each round of the loop, in order; those that were cancelled cost no round."""
    turns = Turns()
    log: list[int] = []

    async def take(number: int) -> None:
        await turns.take()
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
    async with asyncio.timeout(5):
        await asyncio.gather(*tasks, return_exceptions=True)
    await cancel(watcher)
    assert [number for number in log if number >= 0] == [*range(20), *range(30, 40)]
    assert all(-1 in (one, other) for one, other in itertools.pairwise(log)), "two went on in one round"
    async with asyncio.timeout(5):
        await turns.take()
