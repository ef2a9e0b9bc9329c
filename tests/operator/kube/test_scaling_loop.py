"""From metrics to replicas: one operator, real controllers, and exports as a collector sends them."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from support.kubernetes.control_plane import ControlPlane, eventually
from support.kubernetes.operator_process import OperatorProcess, PoolWorld, running_operator
from support.processes.waiting import LIMIT_S

pytestmark = pytest.mark.kube

SWIFT = {
    "stabilization": {"downSeconds": 1, "downStartups": 0, "watchSeconds": 1},
    "panic": {"holdSeconds": 1, "holdStartups": 0, "windowSeconds": 0},
    "rate": {"downPeriodSeconds": 1, "upPeriodSeconds": 1, "downPods": 10, "upPods": 10},
    "idle": {"afterSeconds": 1},
}


@contextmanager
def exporting(
    world: PoolWorld,
    operator: OperatorProcess,
    shares: Callable[[], Mapping[str, float]],
    pool: str,
    *,
    ahead_s: float = 0.0,
    waiting: int = 0,
    drain: float = 0,
) -> Iterator[None]:
    """Export metrics of engines and a gateway every half a second."""
    stop = threading.Event()

    def run() -> None:
        while not stop.wait(0.5):
            world.load(operator, shares(), pool=pool, waiting=waiting, drain=drain, ahead_s=ahead_s)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(LIMIT_S)


def test_full_caches_bring_engines_and_the_status_says_why(operator: OperatorProcess, world: PoolWorld) -> None:
    """The warm spare comes on top of what the law asks for, which is less than all that there are."""
    world.create("busy", minReplicas=1, maxReplicas=4, warmSpares=1, scaling=SWIFT)
    names = world.make_ready("busy", 2)
    share = 0.1
    with exporting(world, operator, lambda: dict.fromkeys(names, share), "busy"):
        eventually(lambda: world.pool("busy")["status"].get("kvUtilization") == "10%", "samples")
        passes = operator.passes()
        eventually(lambda: operator.passes() > passes + 5, "decisions about a pool that one engine could serve")
        assert world.replicas("busy") == 2
        share = 0.95
        eventually(lambda: world.replicas("busy") > 2, "more replicas")
        status = eventually(
            lambda: world.pool("busy")["status"]["desiredReplicas"] > 2 and world.pool("busy")["status"], "a status"
        )
    assert status["scaling"]["limiting"] in ("KvUtilization", "MaxReplicas")
    assert status["scaling"]["inputs"]["kv_utilization"] == 0.95
    assert status["kvUtilization"] == "95%"
    assert status["scaling"]["desired"] == status["desiredReplicas"] - 1
    world.wait_event("ScaledOut", "from 2 to")


@pytest.mark.slow
def test_an_operator_whose_clock_is_wrong_scales(operator: OperatorProcess, world: PoolWorld) -> None:
    """As seen from its pools: the clocks of their engines, and of the gateway, are behind or ahead."""
    apart = {"behind": -10.0, "ahead": 10.0, "far": 45.0}
    for name in apart:
        world.create(name, minReplicas=1, maxReplicas=4, scaling=SWIFT)
    with ExitStack() as stack:
        for name, ahead_s in apart.items():
            shares = dict.fromkeys(world.make_ready(name, 1), 0.97)
            stack.enter_context(exporting(world, operator, lambda shares=shares: shares, name, ahead_s=ahead_s))  # type: ignore[misc]
        for name in apart:
            eventually(lambda name=name: world.replicas(name) > 1, f"more replicas of {name}")  # type: ignore[misc]


def test_the_pod_that_is_cheapest_to_drain_ends(operator: OperatorProcess, world: PoolWorld) -> None:
    world.create("shrinks", minReplicas=1, maxReplicas=3, replicas=3, scaling=SWIFT)
    names = world.make_ready("shrinks", 3)
    shares = {names[0]: 0.30, names[1]: 0.02, names[2]: 0.35}
    with exporting(world, operator, lambda: shares, "shrinks"):
        eventually(lambda: world.pool("shrinks")["status"].get("kvUtilization") == "22%", "samples")
        world.change({"replicas": 2}, "shrinks")
        assert eventually(lambda: world.ending("shrinks"), "a pod that ends") == [names[1]]
        assert eventually(lambda: world.pool("shrinks")["status"]["drainingReplicas"] == 1, "it drains")
        world.end_pods("shrinks")
        world.wait_condition("Progressing", "Settled", "shrinks")


def test_missing_samples_never_scale_in(operator: OperatorProcess, world: PoolWorld) -> None:
    world.create("silent", minReplicas=1, maxReplicas=4, replicas=3, scaling=SWIFT)
    world.make_ready("silent", 3)
    world.change({"replicas": None}, "silent")
    condition = world.wait_condition("ScalingActive", "SamplesMissing", "silent")
    assert "never fewer engines" in condition["message"]
    passes = operator.passes() + 3 * len(world.kube.get(world.path("enginepools"))["items"])
    eventually(lambda: operator.passes() >= passes, "three decisions about each pool, any of which might scale it in")
    assert world.replicas("silent") == 3


def test_a_pool_that_is_born_at_zero_has_one_engine_until_its_model_is_known(
    operator: OperatorProcess, world: PoolWorld
) -> None:
    """And once more when what is in its model card changes."""
    world.create("born", minReplicas=0, maxReplicas=2, scaling=SWIFT)
    world.wait_replicas(1, "born")
    with exporting(world, operator, dict, "born"):
        assert world.wait_condition("ScalingActive", "Publishing", "born")["status"] == "True"
        passes = operator.passes()
        eventually(lambda: operator.passes() > passes + 5, "decisions about an idle queue")
        assert world.replicas("born") == 1

    def serves_and_ends() -> None:
        names = world.make_ready("born", 1)
        with exporting(world, operator, lambda: dict.fromkeys(names, 0.0), "born"):
            world.wait_replicas(0, "born")
            world.end_pods("born")
            world.wait_condition("Ready", "ScaledToZero", "born")

    serves_and_ends()
    world.change({"engine": {"maxModelLen": 512}}, "born")
    world.wait_replicas(1, "born")
    serves_and_ends()


def test_an_idle_pool_goes_to_zero_and_one_message_for_any_of_its_models_brings_it_back(
    operator: OperatorProcess, world: PoolWorld, record_property: Callable[[str, object], None]
) -> None:
    models = [{"source": {"path": "/models/seldom"}, "servedName": "seldom"}]
    world.create("idle", models=models, minReplicas=0, maxReplicas=2, replicas=1, scaling=SWIFT)
    names = world.make_ready("idle", 1)
    with exporting(world, operator, lambda: dict.fromkeys(names, 0.0), "idle"):
        world.change({"replicas": None}, "idle")
        world.wait_replicas(0, "idle")
        world.end_pods("idle")
        world.wait_condition("Ready", "ScaledToZero", "idle")
    start = time.monotonic()
    world.load(operator, {}, model="seldom", waiting=1)
    world.wait_replicas(1, "idle")
    took = time.monotonic() - start
    record_property("seconds_from_zero", took)
    print(f"from one queued message to a decision at zero pods: {took:.1f} s")


def test_what_an_engine_can_do_outlives_the_operator_that_measured_it(
    kube: ControlPlane, new_world: Callable[[], PoolWorld]
) -> None:
    """2,000 tokens/s while requests wait, by two engines. The next operator sees them with room, and believes the
    status: by their caches alone it would take them for four times as fast.
    """
    world = new_world()

    def status(part: str) -> dict[str, Any]:
        return dict(world.pool("kept")["status"].get(part, {}))

    with running_operator(kube, world.namespace, "first") as first:
        world.create("kept", minReplicas=2, maxReplicas=2)
        names = world.make_ready("kept", 2)
        shares = dict.fromkeys(names, 0.5)
        with exporting(world, first, lambda: shares, "kept", waiting=1000, drain=2000):
            eventually(lambda: status("learned").get("capacity") == 1000, "a capacity in the status")
    with running_operator(kube, world.namespace, "next") as after:
        eventually(after.leads, "the next operator leads")
        with exporting(world, after, lambda: shares, "kept", drain=4000):
            eventually(lambda: status("scaling")["inputs"].get("arrivals") == 4000, "its decision")
    assert status("scaling")["inputs"]["capacity"] <= 2000
    assert status("learned")["capacity"] == 1000
