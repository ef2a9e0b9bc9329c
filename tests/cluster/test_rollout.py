"""New engine options in the middle of streams: the same tokens where they are computed alike, an end for all anyway."""

from __future__ import annotations

import time

from cluster_release import Scene


async def test_options_that_leave_the_numerics_alone(scene: Scene) -> None:
    scene.pin(2)
    await scene.settled(2)
    before = scene.pods()
    async with scene.load() as load:
        await load.middle()
        begin = time.monotonic()
        scene.patch(engine={"maxNumSeqs": 48})
        await scene.settled(2)
        scene.times.note("rolling update of 2 engines under load", time.monotonic() - begin)
        assert not before & scene.pods()
        await load.whole()
        scene.times.note("rolling update: longest silence of a stream", load.longest_silence_s)


async def test_options_that_change_the_numerics(scene: Scene) -> None:
    """Other blocks are other orders of additions. Old pods go on with what they began as long as there are any, then
    new ones take over after the grace. No stream is cut, and none is spliced: its digests would differ, and the client
    raise."""
    scene.pin(2)
    await scene.settled(2)
    async with scene.load(compared=False) as load:
        await load.middle()
        begin = time.monotonic()
        scene.patch(engine={"blockSize": 32, "numGpuBlocksOverride": 128})
        await scene.settled(2, limit_s=150)
        scene.times.note("rolling update to other numerics under load", time.monotonic() - begin)
        await load.whole()
        scene.times.note("other numerics: longest silence of a stream (the grace is 30 s)", load.longest_silence_s)
    scene.patch(engine={"blockSize": None, "numGpuBlocksOverride": 256})
    await scene.settled(2)
