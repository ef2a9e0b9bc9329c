"""An API server that dies, comes back, or can't be heard: the operator waits, asks little, and goes on."""

import asyncio
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.kubernetes.control_plane import ControlPlane, eventually
from support.kubernetes.operator_process import PoolWorld, install_definition, running_operator
from support.network.proxy import Proxy
from support.processes.waiting import LIMIT_S

pytestmark = pytest.mark.kube

SHORT = {
    "LEASE_DURATION_S": "4",
    "LEASE_RENEW_S": "1",
    "LEASE_MARGIN_S": "1",
    "REQUEST_TIMEOUT_S": "2",
    "RESYNC_S": "5",
}
CALLS_PER_S = 3.0
"""Of one operator while the API server is away: the lease, retries of passes, and restarts of kopf."""


@contextmanager
def proxied(kube: ControlPlane) -> Iterator[tuple[Proxy, Path, asyncio.AbstractEventLoop]]:
    """A way to the API server that can be cut."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    proxy = Proxy(kube.port)
    try:
        asyncio.run_coroutine_threadsafe(proxy.__aenter__(), loop).result(LIMIT_S)
        yield proxy, kube.kubeconfig_at(proxy.port), loop
    finally:
        asyncio.run_coroutine_threadsafe(proxy.__aexit__(None, None, None), loop).result(LIMIT_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(LIMIT_S)
        loop.close()


def test_a_killed_api_server_is_waited_for(kube: ControlPlane) -> None:
    world = PoolWorld(kube, "outage")
    with running_operator(kube, world.namespace) as operator:
        eventually(operator.leads, "a leader")
        world.create("demo", replicas=1)
        world.wait_condition("Ready", "NoEngine")
        kube.kill_server()
        before, start = operator.calls(), time.monotonic()
        eventually(lambda: not operator.leads(), "the lease ends", 60)
        rate = (operator.calls() - before) / (time.monotonic() - start)
        print(f"calls per second while the API server is away: {rate:.1f}")
        assert rate <= CALLS_PER_S
        assert operator.page("/healthz")[0] == 200
        kube.start_server()
        kube.wait_ready()
        world.change({"replicas": 3})
        world.wait_replicas(3)
        assert world.config_map()


def test_a_namespace_that_ends_takes_its_operator_and_its_pools_along(kube: ControlPlane) -> None:
    """No operator would be left to remove the finalizer."""
    world = PoolWorld(kube, "ending")
    with running_operator(kube, world.namespace) as operator:
        eventually(operator.leads, "a leader")
        world.create("demo", replicas=1, drain={"deletionTimeoutSeconds": 3600})
        world.make_ready("demo", 1)
        world.wait_condition("Ready", "EnoughEngines")
        kube.delete(f"/api/v1/namespaces/{world.namespace}")
        # Pods go first, the operator's own among them; pools follow when all pods have ended.
        eventually(world.ending, "its pod is ending")
        operator.signal(signal.SIGTERM)
        assert operator.wait() == 0
    world.end_pods()
    eventually(lambda: not kube.exists(f"/api/v1/namespaces/{world.namespace}"), "the namespace is gone")


def test_deletions_that_no_watch_reported_are_found(kube: ControlPlane) -> None:
    """A pod and a whole pool end while the operator can't hear: kopf alone would keep them for ever."""
    world = PoolWorld(kube, "deaf")
    with proxied(kube) as (proxy, kubeconfig, loop):
        with running_operator(kube, world.namespace, kubeconfig=kubeconfig, **SHORT) as operator:
            eventually(operator.leads, "a leader")
            world.create("kept", replicas=2, drain={"deletionTimeoutSeconds": 0})
            world.create("lost", replicas=0)
            names = world.make_ready("kept", 2)
            world.wait_condition("Ready", "EnoughEngines", "kept")
            world.wait_condition("Ready", "ScaledToZero", "lost")
            loop.call_soon_threadsafe(proxy.cut)
            world.kube.merge(world.path("enginepools", "lost"), {"metadata": {"finalizers": None}})
            world.kube.delete(world.path("enginepools", "lost"))
            world.kube.delete(world.path("pods", names[0]), gracePeriodSeconds=0)
            eventually(lambda: not operator.leads(), "the lease ends: it must not act on what it remembers", 60)
            loop.call_soon_threadsafe(proxy.heal)
            eventually(operator.leads, "it leads again", 90)
            eventually(
                lambda: len(operator.figures("pagestream_operator_ready_replicas")) == 1,
                "the lost pool is forgotten",
                60,
            )
            eventually(lambda: world.pool("kept")["status"]["readyReplicas"] == 1, "the pod is no longer counted", 60)


@pytest.mark.slow
def test_what_a_backup_brings_back_is_what_there_is(tmp_path: Path) -> None:
    """Objects have lower versions than the operator remembers: its lists win over its memory."""
    with ControlPlane(tmp_path / "kube") as kube:
        install_definition(kube)
        world = PoolWorld(kube, "backup")
        with running_operator(kube, world.namespace, RESYNC_S="5") as operator:
            eventually(operator.leads, "a leader")
            world.create(replicas=1)
            world.wait_replicas(1)
            world.wait_condition("Ready", "NoEngine")
            kube.save_data(tmp_path / "backup")
            for number in range(40):
                world.change({"replicas": 1 + number % 5})
            eventually(operator.leads, "a leader", 90)
            world.wait_replicas(5)
            kube.restore_data(tmp_path / "backup")
            assert world.replicas() == 1
            world.change({"replicas": 3})
            world.wait_replicas(3)


def test_a_change_that_no_watch_shows_is_found_by_the_conflict_that_it_makes(kube: ControlPlane) -> None:
    """A router forgets the open connections: watches stay open and silent, while calls time out and connect anew."""
    world = PoolWorld(kube, "silent")
    with proxied(kube) as (proxy, kubeconfig, loop):
        with running_operator(kube, world.namespace, kubeconfig=kubeconfig, REQUEST_TIMEOUT_S="2") as operator:
            eventually(operator.leads, "a leader")
            world.create("demo", maxReplicas=3)
            [pod] = world.make_ready("demo")
            world.wait_condition("Ready", "EnoughEngines")
            loop.call_soon_threadsafe(proxy.strand)
            note = {"metadata": {"annotations": {"note": "changed by hand"}}}
            kube.merge(world.path("deployments", "demo-engine"), note)

            def is_scaled() -> bool:
                world.load(operator, {pod: 0.99}, waiting=500_000)
                return world.replicas() == 3

            # kopf gives up a watch after 70 s of silence.
            eventually(is_scaled, "an order of the law on the changed Deployment", 50)
