"""Replicas and one lease: who leads, what the death of a leader costs, and what is refused after a term has ended."""

import asyncio
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime

import pytest
from pagestream_operator import Conflict, NotLeading
from pagestream_operator.api import EnginePool
from pagestream_operator.children import children
from pagestream_operator.kube import (
    DEPLOYMENT,
    SCALER,
    Applier,
    KubeClient,
    Leadership,
    LeaseSettings,
    ObjectStore,
    Outcome,
)
from support.kubernetes.control_plane import ControlPlane, eventually
from support.kubernetes.operator_process import OperatorProcess, PoolWorld, running_operator, started_operator
from support.kubernetes.pool_objects import DEFAULTS
from support.processes.waiting import LIMIT_S

pytestmark = pytest.mark.kube

# -- Two replicas, one lease: who leads, what the death of a leader costs, and what a leader that only slept can't do


SHORT = {"LEASE_DURATION_S": "7", "LEASE_RENEW_S": "1", "LEASE_MARGIN_S": "1", "LEASE_LOOK_S": "0.5"}
Pair = tuple[OperatorProcess, OperatorProcess]


@pytest.fixture(scope="module")
def place(kube: ControlPlane) -> PoolWorld:
    return PoolWorld(kube, "leadership")


@contextmanager
def replicas(kube: ControlPlane, place: PoolWorld, **settings: str) -> Iterator[Pair]:
    """The leader, and the other one. They start together: either may get the lease."""
    with ExitStack() as stack:
        both = [
            stack.enter_context(started_operator(kube, place.namespace, name, kubeconfig=None, **settings))
            for name in ("one", "two")
        ]
        for each in both:
            each.wait_ready()
        eventually(lambda: any(each.leads() for each in both), "a leader")
        leader, other = sorted(both, key=lambda each: not each.leads())
        yield leader, other


def test_a_leader_that_stops_hands_over_at_once_and_one_that_is_killed_after_its_lease(
    kube: ControlPlane, place: PoolWorld, record_property: Callable[[str, object], None]
) -> None:
    with replicas(kube, place) as (first, second):
        _stop_leader(first, second, place)
        # As a StatefulSet does: the replica that has ended comes back under its name.
        first.start()
        first.wait_ready()
        assert not first.leads()
        took = _kill_leader(second, first, place)
        record_property("handover_seconds", took)
        print(f"from the leader's death to the next one's act: {took:.1f} s")


def _stop_leader(first: OperatorProcess, second: OperatorProcess, place: PoolWorld) -> None:
    place.create("stops", replicas=1)
    place.wait_replicas(1, "stops")
    assert not second.leads()
    eventually(lambda: second.figures("pagestream_operator_reconciles_total")['result="ok"'] > 0, "it follows")
    renewed = place.lease()["renewTime"]
    eventually(lambda: place.lease()["renewTime"] != renewed, "the lease is renewed")
    before = place.lease()
    first.signal(signal.SIGTERM)
    eventually(second.leads, "the other one leads")
    assert first.wait() == 0
    # A lease that lapses is taken when all of its duration has passed without a renewal. Both times are the replicas'
    # own, so that it doesn't matter when this process gets to look.
    waited = datetime.fromisoformat(place.lease()["acquireTime"]) - datetime.fromisoformat(before["renewTime"])
    assert waited.total_seconds() < before["leaseDurationSeconds"]
    place.change({"replicas": 2}, "stops")
    place.wait_replicas(2, "stops")


def _kill_leader(first: OperatorProcess, second: OperatorProcess, place: PoolWorld) -> float:
    first.kill()
    start = time.monotonic()
    place.change({"replicas": 3}, "stops")
    place.wait_replicas(3, "stops")
    took = time.monotonic() - start
    assert second.leads()
    return took


def test_a_leader_that_slept_changes_nothing(kube: ControlPlane, place: PoolWorld) -> None:
    """SIGSTOP: it doesn't know that time has passed. What it wakes up with belongs to a term that has ended."""
    with replicas(kube, place, **SHORT) as (first, second):
        place.create("slept", replicas=1)
        place.wait_replicas(1, "slept")
        place.wait_condition("Ready", "NoEngine", "slept")
        first.signal(signal.SIGSTOP)
        try:
            eventually(second.leads, "the other one leads")
            place.change({"replicas": 4}, "slept")
            place.wait_replicas(4, "slept")
            term = int(str(place.lease()["leaseTransitions"]))
            eventually(lambda: place.pool("slept")["status"]["leaderTerm"] == term, "the new term is on the pool")
            eventually(lambda: _term(place, "slept") == str(term), "the new term is on the Deployment")
            before = place.deployment("slept")["metadata"]["generation"]
        finally:
            first.signal(signal.SIGCONT)
        eventually(lambda: first.is_alive() and not first.leads(), "it knows that it doesn't lead")
        calls = _writes(first)
        place.change({"replicas": 5}, "slept")
        place.wait_replicas(5, "slept")
        assert place.deployment("slept")["metadata"]["generation"] == before + 1
        assert str(place.lease()["holderIdentity"]).startswith(second.name)
        assert _writes(first) == calls


def _term(place: PoolWorld, name: str) -> str:
    found: str = place.deployment(name)["metadata"]["labels"]["pagestream.dev/leader-term"]
    return found


def _writes(operator: OperatorProcess) -> float:
    calls = operator.figures("pagestream_operator_api_calls_total").items()
    return sum(count for labels, count in calls if 'verb="scale"' in labels or 'verb="apply"' in labels)


def test_a_restarted_operator_writes_nothing_but_its_term(kube: ControlPlane, place: PoolWorld) -> None:
    """An upgrade of the operator restarts no engine: the same pool gives the same template."""
    with running_operator(kube, place.namespace, "old") as old:
        eventually(old.leads, "a leader")
        place.create("upgraded", replicas=2)
        place.make_ready("upgraded", 2)
        place.wait_condition("Ready", "EnoughEngines", "upgraded")
    before, pods = place.deployment("upgraded"), place.pods("upgraded")
    with running_operator(kube, place.namespace, "new") as new:
        eventually(new.leads, "a leader")
        term = str(place.lease()["leaseTransitions"])
        eventually(lambda: _term(place, "upgraded") == term, "the new term")
        after = place.deployment("upgraded")
        assert after["spec"] == before["spec"]
        assert after["metadata"]["generation"] == before["metadata"]["generation"]
        assert place.pods("upgraded") == pods
        assert not [note for note in place.events("Updated") if "upgraded-engine" in note]


# -- The fence on a real API server: what a leader sends after its term has ended is refused, wherever it was frozen


NAMES = LeaseSettings("fence", "fence", duration_s=5.0, renew_s=0.5, margin_s=0.5, look_s=0.2)
Act = Callable[[KubeClient, Leadership, Applier], Awaitable[None]]


@pytest.fixture(scope="module")
def fenced(kube: ControlPlane) -> PoolWorld:
    world = PoolWorld(kube, NAMES.namespace)
    world.create(replicas=1)
    return world


async def lead(name: str, act: Act) -> None:
    """Become the leader, act, and stop."""
    async with KubeClient(5.0) as client:
        leading = asyncio.Event()
        leadership = Leadership(client, NAMES, name, on_change=lambda leads: leading.set() if leads else None)
        stop = asyncio.Event()
        running = asyncio.create_task(leadership.run(stop))
        try:
            async with asyncio.timeout(LIMIT_S):
                await leading.wait()
            await act(client, leadership, Applier(client, ObjectStore(), leadership))
        finally:
            stop.set()
            await running


def in_thread(name: str, act: Act) -> None:
    """The same in another thread, while this one does nothing: neither its timers nor its renewals run."""
    failed: list[BaseException] = []

    def run() -> None:
        try:
            asyncio.run(lead(name, act))
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(2 * LIMIT_S)
    assert not thread.is_alive()
    if failed:
        raise failed[0]


async def test_a_frozen_leaders_write_is_refused(
    kube: ControlPlane, fenced: PoolWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(kube.kubeconfig))
    pool = EnginePool.from_object(fenced.pool())
    manifest = children(pool, DEFAULTS)[-1]
    terms: list[int] = []

    async def apply(client: KubeClient, leadership: Leadership, applier: Applier) -> None:
        terms.append(leadership.term)
        assert await applier.apply(pool, manifest, replicas=1) is not Outcome.UNCHANGED

    async def freeze(client: KubeClient, leadership: Leadership, applier: Applier) -> None:
        await apply(client, leadership, applier)
        read = await client.get(DEPLOYMENT, fenced.namespace, "demo-engine")
        version = read["metadata"]["resourceVersion"]
        late = {"version": version, "manager": SCALER}
        with pytest.raises((Conflict, NotLeading)):  # noqa: PT012 - whichever notices first
            async with leadership.act():
                in_thread("next", apply)  # the check was passed; now time passes, and another one leads
                await client.apply_scale(DEPLOYMENT, fenced.namespace, "demo-engine", 9, **late)
        with pytest.raises(Conflict):
            await client.apply_scale(DEPLOYMENT, fenced.namespace, "demo-engine", 9, **late)

    await lead("first", freeze)
    assert terms == [terms[0], terms[0] + 1]
    assert fenced.replicas() == 1


async def test_who_does_not_lead_writes_nothing(
    kube: ControlPlane, fenced: PoolWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(kube.kubeconfig))
    pool = EnginePool.from_object(fenced.pool())
    async with KubeClient(5.0) as client:
        applier = Applier(client, ObjectStore(), Leadership(client, NAMES, "idle"))
        with pytest.raises(NotLeading):
            await applier.apply(pool, children(pool, DEFAULTS)[0], replicas=1)
        assert {verb for verb, _ in client.calls} == {"get"}
