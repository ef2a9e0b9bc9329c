import asyncio
from pathlib import Path

from pagestream_streams.fault_points import FaultPoint, Wire
from support.faults.fault_points import FaultPointController

LIMIT_S = 10.0


async def test_pauses_a_process_at_the_armed_passage_until_it_is_resumed(tmp_path: Path) -> None:
    async with FaultPointController(tmp_path / "socket") as controller:
        controller.arm({FaultPoint.MIDDLE: 2})
        wire = Wire(str(controller.path))
        await asyncio.to_thread(wire.reach, FaultPoint.MIDDLE)
        passing = asyncio.create_task(asyncio.to_thread(wire.reach, FaultPoint.MIDDLE))
        pause = await controller.next_pause(LIMIT_S)
        assert pause.point is FaultPoint.MIDDLE
        assert not passing.done()
        controller.resume(pause.pid)
        await asyncio.wait_for(passing, LIMIT_S)
        wire.close()


async def test_a_process_that_pauses_after_the_disarming_is_resumed_at_once(tmp_path: Path) -> None:
    """It reaches its point before it receives the disarming."""
    async with FaultPointController(tmp_path / "socket") as controller:
        controller.arm({FaultPoint.MIDDLE: 2})
        wire = Wire(str(controller.path))
        await asyncio.to_thread(wire.reach, FaultPoint.MIDDLE)
        controller._orders = {}  # as disarm, without its message
        passing = asyncio.create_task(asyncio.to_thread(wire.reach, FaultPoint.MIDDLE))
        await asyncio.wait_for(passing, LIMIT_S)
        assert controller.take_pauses() == []
        wire.close()
