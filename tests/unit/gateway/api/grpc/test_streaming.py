"""Writes whose completion is looked at when the next one begins."""

import asyncio
from typing import Any

import pytest
from pagestream_gateway.api.grpc.streaming import OverlappedWrites


class Call:
    """Completes a write when it is told to, as gRPC does once the client's window has room."""

    def __init__(self) -> None:
        self.completed: list[str] = []
        self.outstanding: asyncio.Future[None] | None = None

    async def write(self, message: str) -> None:
        self.outstanding = asyncio.get_running_loop().create_future()
        await self.outstanding
        self.completed.append(message)


async def test_a_write_begins_once_the_one_before_is_done() -> None:
    call: Any = Call()
    writes = OverlappedWrites(call)
    assert writes.is_ready
    writes.begin("a")
    assert not writes.is_ready
    following = asyncio.create_task(writes.write("b"))
    await asyncio.sleep(0)
    assert call.completed == []
    call.outstanding.set_result(None)
    for _ in range(5):  # rounds of the loop: the wait, the end of one write, the begin of the next
        await asyncio.sleep(0)
    assert call.completed == ["a"]
    call.outstanding.set_result(None)
    await following
    assert call.completed == ["a", "b"]
    assert writes.is_ready


async def test_a_failed_write_fails_the_next_one() -> None:
    call: Any = Call()
    writes = OverlappedWrites(call)
    writes.begin("a")
    call.outstanding.set_exception(OSError("the client has left"))
    with pytest.raises(OSError, match="has left"):
        writes.begin("b")
    writes.begin("c")
    call.outstanding.set_exception(OSError("the client has left"))
    with pytest.raises(OSError, match="has left"):
        await writes.flush()


async def test_closing_gives_up_what_is_outstanding() -> None:
    call: Any = Call()
    writes = OverlappedWrites(call)
    writes.begin("a")
    writes.close()
    assert call.outstanding.cancelled()
    assert call.completed == []
    writes.begin("b")
    call.outstanding.set_exception(OSError("the client has left"))
    writes.close()
    assert writes.is_ready
