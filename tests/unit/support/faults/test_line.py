import asyncio
from pathlib import Path

from pagestream_streams.fault_points import FaultPoint, Wire
from support.faults.line import FaultLine

LIMIT_S = 10.0


async def test_arms_hears_and_lets_go(tmp_path: Path) -> None:
    async with FaultLine(tmp_path / "socket") as line:
        line.arm({FaultPoint.MIDDLE: 2})
        wire = Wire(str(line.path))
        await asyncio.to_thread(wire.reach, FaultPoint.MIDDLE)
        passing = asyncio.create_task(asyncio.to_thread(wire.reach, FaultPoint.MIDDLE))
        stop = await line.stop(LIMIT_S)
        assert stop.point is FaultPoint.MIDDLE
        assert not passing.done()
        line.go(stop.pid)
        await asyncio.wait_for(passing, LIMIT_S)
        wire.close()


async def test_who_stops_late_is_let_go_at_once(tmp_path: Path) -> None:
    """It was armed, and reaches its moment before it hears that it no longer is."""
    async with FaultLine(tmp_path / "socket") as line:
        line.arm({FaultPoint.MIDDLE: 2})
        wire = Wire(str(line.path))
        await asyncio.to_thread(wire.reach, FaultPoint.MIDDLE)
        line._orders = {}  # as disarm, without its word
        passing = asyncio.create_task(asyncio.to_thread(wire.reach, FaultPoint.MIDDLE))
        await asyncio.wait_for(passing, LIMIT_S)
        assert line.waiting() == []
        wire.close()
