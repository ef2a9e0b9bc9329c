"""New engine options in the middle of streams: the same tokens where they are computed alike, an end for all anyway."""

from __future__ import annotations

import time

from cluster.release import Scene

LONGEST_SILENCE_S = 15.0
"""Half of `fingerprint_grace_ms`: a stream that had to wait for the grace would be silent for twice as long."""


async def test_options_that_leave_the_numerics_alone(scene: Scene) -> None:
    scene.pin(2)
    await scene.settled(2)
    before = scene.pods()
    async with scene.load() as load:
        await load.wait_under_way()
        begin = time.monotonic()
        scene.patch(engine={"maxNumSeqs": 48})
        await scene.settled(2)
        scene.times.note("rolling update of 2 engines under load", time.monotonic() - begin)
        assert not before & scene.pods()
        await load.wait_marked()
        scene.times.note("rolling update: longest silence of a stream", load.longest_silence_s)


async def test_options_that_change_the_numerics(scene: Scene) -> None:
    """Other blocks are other orders of additions. Old pods finish what has tokens: the last one of them stays until it
    has, so no stream waits for the grace, and all that were under way have the old pods' tokens."""
    scene.pin(2)
    scene.patch(drain={"graceSeconds": 180})
    await scene.settled(2)
    async with scene.load(compared=False) as load:
        await load.wait_under_way()
        begin = time.monotonic()
        scene.patch(engine={"blockSize": 32, "numGpuBlocksOverride": 128})
        await load.wait_marked()
        assert load.longest_silence_s < LONGEST_SILENCE_S, "a stream waited for an engine that computes as its last one"
        scene.times.note("other numerics: longest silence of a stream that was under way", load.longest_silence_s)
        await scene.settled(2, limit_s=240)
        scene.times.note("rolling update to other numerics under load", time.monotonic() - begin)
    scene.patch(engine={"blockSize": None, "numGpuBlocksOverride": 256}, drain={"graceSeconds": 30})
    await scene.settled(2)
