"""Whatever dies, every open stream goes on and ends with the same tokens."""

from __future__ import annotations

import asyncio
import signal
import time

import pytest
from cluster.release import NAMESPACE, Scene, busiest_engine, delete_by_force, num_restarts
from cluster.resources import Object, name_of, process_of, send

FROZEN_S = 15.0  # longer than an engine's lease lives


@pytest.fixture(autouse=True)
async def two_engines(scene: Scene) -> None:
    scene.pin(2)
    await scene.settled(2)


def need_node_here(scene: Scene) -> None:
    """Skip the test where the engines' processes don't run on this machine."""
    process_of(NAMESPACE.get("pod", NAMESPACE.ready_pods(scene.engines)[0]), "engine")


async def test_an_engine_pod_deleted_by_force(scene: Scene) -> None:
    def delete() -> None:
        delete_by_force(name_of(busiest_engine(scene)))

    async with scene.disturbed("kubectl delete pod --force of an engine", delete):
        begin = time.monotonic()
        await scene.settled(2)
        scene.times.note("from there until the pool is whole", time.monotonic() - begin)


@pytest.mark.short
async def test_an_engine_process_killed_on_the_node(scene: Scene) -> None:
    need_node_here(scene)
    victims: list[Object] = []

    def kill() -> None:
        victims.append(busiest_engine(scene))
        send(victims[0], "engine", signal.SIGKILL)

    async with scene.disturbed("kill -9 of an engine's process", kill):
        await scene.until("the container's restart", lambda: num_restarts(name_of(victims[0])))
        await scene.settled(2)


async def test_a_lost_node(scene: Scene) -> None:
    """An engine that neither works nor ends, as on a node that is cut off: its lease lapses, others go on, and what it
    writes when it is back is refused."""
    need_node_here(scene)
    victims: list[Object] = []

    def stop() -> None:
        victims.append(busiest_engine(scene))
        send(victims[0], "engine", signal.SIGSTOP)

    async with scene.disturbed("an engine cut off for 15 s", stop) as load:
        try:
            await asyncio.sleep(FROZEN_S)  # what is tested is that time passes
            load.check()
        finally:
            send(victims[0], "engine", signal.SIGCONT)


async def test_the_leading_operator_killed(scene: Scene) -> None:
    lease = f"{scene.release.name}-operator"

    def holder() -> str:
        return str(NAMESPACE.get("lease", lease)["spec"].get("holderIdentity") or "")

    first = holder()
    leader = next(pod for pod in NAMESPACE.ready_pods(scene.release.selector("operator")) if pod in first)
    async with scene.disturbed("the leading operator killed", lambda: delete_by_force(leader)):
        begin = time.monotonic()
        await scene.until("another leader", lambda: holder() not in ("", first), limit_s=30)
        scene.times.note("from there until another operator leads", time.monotonic() - begin)
        scene.pin(3)
        await scene.settled(3)


async def test_the_redis_pod_killed(scene: Scene) -> None:
    victim = NAMESPACE.ready_pods(scene.release.selector("redis"))[0]
    async with scene.disturbed("Redis' pod killed", lambda: delete_by_force(victim)):
        await scene.until("Redis", lambda: NAMESPACE.ready_pods(scene.release.selector("redis")))


def delete(pod: str) -> None:
    NAMESPACE.kubectl("delete", "pod", pod, "--wait=false")


async def test_gateway_pods(scene: Scene) -> None:
    """One that is deleted hands its streams on; then one is deleted by force."""
    gateways = scene.release.selector("gateway")
    count = len(NAMESPACE.ready_pods(gateways))
    async with scene.load() as load:
        for way, lose in {"deleted": delete, "deleted by force": delete_by_force}.items():
            await load.wait_under_way()
            await asyncio.to_thread(lose, NAMESPACE.ready_pods(gateways)[0])
            await scene.until("as many gateways", lambda: len(NAMESPACE.ready_pods(gateways)) == count, limit_s=90)
            await load.wait_marked()
            scene.times.note(f"a gateway pod {way}: longest silence of a stream", load.longest_silence_s)
