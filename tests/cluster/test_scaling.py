"""Load brings engines, by KV utilization; fewer engines, in the middle of streams, cost no token."""

from __future__ import annotations

import time

from cluster.release import NAMESPACE, Scene
from cluster.resources import Object, seconds_to_ready

FEW_BLOCKS = 256  # 4,096 tokens: six or seven of these streams fill it
EARLY = {"target": 0.25, "low": 0.1}


def scaling(scene: Scene) -> Object:
    """The last decision, by the pool's status."""
    found: Object = scene.pool.get("status", {}).get("scaling") or {}
    return found


async def test_kv_utilization_brings_engines(scene: Scene) -> None:
    """Five long streams are no backlog for one engine; it is its KV pool that they fill."""
    scene.patch(engine={"numGpuBlocksOverride": FEW_BLOCKS}, scaling={"kvUtilization": EARLY})
    await scene.settled(1)
    decisions: list[Object] = []

    def decided() -> bool:
        decisions.append(scaling(scene))
        return any(each["limiting"] == "KvUtilization" and each["desired"] >= 2 for each in decisions)

    async with scene.load(width=5) as load:
        begin = time.monotonic()
        await scene.until("a decision for more engines by KV utilization", decided)
        scene.times.note("load until KV utilization's decision is in the status", time.monotonic() - begin)
        last = decisions[-1]
        assert last["inputs"]["kv_utilization_sum"] > EARLY["target"], "the one engine's, smoothed"
        assert not last.get("missing")
        assert "KV" in last["reason"] or "kv" in last["reason"]
        await scene.until("another engine", lambda: len(NAMESPACE.ready_pods(scene.engines)) >= 2, limit_s=120)
        scene.times.note("that load until a second engine is ready", time.monotonic() - begin)
        await load.wait_finished(3)
    events = [event["reason"] for event in NAMESPACE.find("events") if event["involvedObject"]["kind"] == "EnginePool"]
    assert events, "a person who looks at the pool's events sees why it grew"


async def test_more_load_brings_all_engines(scene: Scene) -> None:
    scene.patch(scaling={"kvUtilization": None})
    async with scene.load(width=24) as load:
        begin = time.monotonic()
        await scene.until("three engines", lambda: len(NAMESPACE.ready_pods(scene.engines)) == 3, limit_s=120)
        scene.times.note("24 streams until three engines are ready", time.monotonic() - begin)
        await load.wait_finished(6)
    newest = max(NAMESPACE.pods(scene.engines), key=lambda pod: str(pod["metadata"]["creationTimestamp"]))
    scene.times.note("an engine's start-up under load: pod created until ready", seconds_to_ready(newest))


async def test_scale_in_in_the_middle_of_streams(scene: Scene) -> None:
    scene.pin(3)
    await scene.settled(3)
    async with scene.load(width=8) as load:
        await load.wait_under_way()
        begin = time.monotonic()
        scene.pin(1)
        await scene.until("two engines to drain and go", lambda: len(NAMESPACE.find("pods", scene.engines)) == 1)
        scene.times.note("kubectl scale from 3 to 1 under load, until both pods are gone", time.monotonic() - begin)
        await load.wait_marked()
        scene.times.note("scale-in: longest silence of a stream", load.longest_silence_s)


async def test_scale_in_when_load_has_gone(scene: Scene) -> None:
    """Unpinned, the pool goes back to its minimum."""
    scene.pin(2)
    await scene.settled(2)
    begin = time.monotonic()
    scene.patch(replicas=None)
    await scene.settled(1)
    scene.times.note("an idle pool from 2 engines to its minimum (5 s windows)", time.monotonic() - begin)
