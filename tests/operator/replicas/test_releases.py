"""The operators of two releases in one namespace: each pool has one of them, and neither writes what is the other's."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.kubernetes.control_plane import ControlPlane, eventually
from support.kubernetes.operator_process import OperatorProcess, PoolWorld, running_operator
from support.telemetry.otlp_messages import export, gauge, resource

pytestmark = pytest.mark.kube

Both = tuple[OperatorProcess, OperatorProcess]


@pytest.fixture(scope="module")
def place(kube: ControlPlane) -> PoolWorld:
    return PoolWorld(kube, "two-releases")


@pytest.fixture(scope="module")
def both(kube: ControlPlane, place: PoolWorld) -> Iterator[Both]:
    def settings(release: str) -> dict[str, str]:
        return {"LEASE_NAME": release, "RELEASE": f"home.{release}", "REDIS_SECRET": f"{release}-redis"}

    with (
        running_operator(kube, place.namespace, "one", **settings("one")) as one,
        running_operator(kube, place.namespace, "two", **settings("two")) as two,
    ):
        eventually(lambda: one.leads() and two.leads(), "both lead, each by its own lease")
        yield one, two


def holder(place: PoolWorld, name: str) -> str | None:
    found: str | None = place.pool(name).get("status", {}).get("controllerClass")
    return found


def redis_of(place: PoolWorld, name: str) -> str:
    container = place.deployment(name)["spec"]["template"]["spec"]["containers"][0]
    variables = {each["name"]: each for each in container["env"]}
    found: str = variables["PAGESTREAM_WORKER__REDIS"]["valueFrom"]["secretKeyRef"]["name"]
    return found


def test_a_pool_that_names_a_release_is_served_by_it_and_moves_with_the_name(both: Both, place: PoolWorld) -> None:
    place.create("named", controllerClass="home.two", replicas=1)
    place.wait_replicas(1, "named")
    assert (redis_of(place, "named"), holder(place, "named")) == ("two-redis", "home.two")
    place.change({"controllerClass": "home.one"}, "named")
    eventually(lambda: redis_of(place, "named") == "one-redis", "the other release's template")
    assert holder(place, "named") == "home.one"
    assert place.deployment("named")["metadata"]["annotations"]["pagestream.dev/controller-class"] == "home.one"
    assert not place.condition("Contested", "named")


def is_left_alone(both: Both, place: PoolWorld, name: str) -> bool:
    """Whether neither operator writes a pool or its deployment in three passes: two that disagree write in each."""

    def written() -> tuple[object, object]:
        return place.deployment(name)["metadata"]["generation"], place.pool(name)["metadata"]["resourceVersion"]

    passes, before = [operator.passes() for operator in both], written()
    eventually(
        lambda: all(now.passes() > since + 3 for now, since in zip(both, passes, strict=True)), "passes of both", 30
    )
    return written() == before


def test_a_pool_that_names_none_has_one_operator_and_shows_the_other(both: Both, place: PoolWorld) -> None:
    place.create("free", replicas=1)
    condition = place.wait_condition("Contested", "ServedByAnother", "free")
    first = holder(place, "free")
    other = ({"home.one", "home.two"} - {first}).pop()
    assert f"set spec.controllerClass to {first} to keep it there, or to {other} to move it" in condition["message"]
    place.wait_replicas(1, "free")
    place.wait_condition("Ready", "NoEngine", "free")
    eventually(lambda: is_left_alone(both, place, "free"), "three passes of both that write nothing", 60)
    place.change({"controllerClass": first}, "free")
    eventually(lambda: not place.condition("Contested", "free"), "nothing is contested")
    assert holder(place, "free") == first


def test_a_pool_scales_by_the_queue_of_its_release(both: Both, place: PoolWorld) -> None:
    """Whose gateways run in another namespace, and have a namesake of the model beside them."""
    place.create("far", controllerClass="home.one", minReplicas=0, maxReplicas=4)
    place.wait_condition("ScalingActive", "Publishing", "far")

    def report(release: str, depth: float) -> Any:
        now, model = time.time(), {"gen_ai.request.model": "far"}
        values = {"depth": depth, "tokens": 10_000 * depth, "age": 5 * depth, "running": 0, "drain_rate": 0}
        gauges = [gauge(f"pagestream.queue.{name}", now, value, model) for name, value in values.items()]
        return resource(gauges, namespace="home", instance=f"gateway-of-{release}", release=release)

    def scaling() -> dict[str, Any]:
        found: dict[str, Any] = place.pool("far").get("status", {}).get("scaling", {})
        return found

    def sends(*reports: Callable[[], Any], until: Callable[[], bool]) -> None:
        def step() -> bool:
            for each in reports:
                for operator in both:
                    operator.export_metrics(export(each()))
            return until()

        eventually(step, "a decision by these reports", 30)

    sends(
        lambda: report("home.two", 9), lambda: report("home.one", 0), until=lambda: "queue_depth" in scaling()["inputs"]
    )
    assert scaling()["inputs"]["queue_depth"] == 0
    sends(lambda: report("home.one", 9), until=lambda: scaling()["inputs"]["queue_depth"] == 9)
