"""Room for large requests: they wait for each other, small ones do not, and who sends slowly gives way."""

import asyncio
import time

import pytest
from pagestream_gateway.core.tokenization import SMALL_BYTES, PendingRequests
from pagestream_gateway.errors import Overloaded


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
