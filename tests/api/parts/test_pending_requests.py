"""Room for requests that are read: a bounded queue for the threads, and bytes of large ones, whose slow senders give
way.
"""

import asyncio
import threading
import time

import pytest
from pagestream_gateway.encoder import TokenizePool
from pagestream_gateway.errors import Overloaded
from pagestream_gateway.gateway import SMALL_BYTES, PendingRequests
from support.processes.waiting import LIMIT_S


async def test_what_waits_for_the_threads_is_bounded_and_room_comes_back() -> None:
    gate = threading.Event()
    async with TokenizePool(workers=1, max_pending=2, limit_s=20) as pool:
        calls = [asyncio.create_task(pool.run(lambda: gate.wait(LIMIT_S))) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="at most 2") as caught:
            await pool.run(int)
        assert caught.value.retry_after_s > 0
        gate.set()
        assert await asyncio.gather(*calls) == [True, True]
        assert await pool.run(int) == 0


async def test_an_abandoned_call_counts_until_its_thread_is_done() -> None:
    gate = threading.Event()
    async with TokenizePool(workers=1, max_pending=1, limit_s=0.05) as pool:
        with pytest.raises(Overloaded, match="longer than"):
            await pool.run(lambda: gate.wait(LIMIT_S))
        with pytest.raises(Overloaded, match="too many"):
            await pool.run(int)
        gate.set()


async def test_large_requests_wait_for_each_other_and_small_ones_do_not() -> None:
    pending = PendingRequests(8 * SMALL_BYTES, limit_s=0.05)
    async with pending.hold(100 * SMALL_BYTES), pending.hold(SMALL_BYTES):
        with pytest.raises(Overloaded, match="large requests"):
            async with pending.hold(2 * SMALL_BYTES):
                pytest.fail("there was no room")
        async with pending.hold(SMALL_BYTES):
            pass
    async with pending.hold(2 * SMALL_BYTES), pending.hold(6 * SMALL_BYTES):
        pass


async def hold_one(pending: PendingRequests) -> None:
    async with pending.hold(2 * SMALL_BYTES):
        pass


async def test_a_sender_gives_way_once_another_has_waited_for_its_patience() -> None:
    pending = PendingRequests(2 * SMALL_BYTES, limit_s=20, patience_s=0.1)
    async with pending.hold(2 * SMALL_BYTES) as slow:
        other = asyncio.create_task(hold_one(pending))
        with pytest.raises(Overloaded, match="arrives slowly"):
            async with slow.receiving():
                await asyncio.sleep(20)
    await other


async def test_no_sender_gives_way_because_this_process_was_late() -> None:
    pending = PendingRequests(2 * SMALL_BYTES, limit_s=20, patience_s=0.4)
    async with pending.hold(2 * SMALL_BYTES) as prompt:
        other = asyncio.create_task(hold_one(pending))
        async with prompt.receiving():
            await asyncio.sleep(0.01)  # the other waits from here on
            time.sleep(1.0)  # noqa: ASYNC251, the process reads nothing
            await asyncio.sleep(0.05)  # then the body arrives
    await other
