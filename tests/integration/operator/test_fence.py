"""The fence on a real API server: what a leader sends after its term has ended is refused, wherever it was frozen."""

import asyncio
import threading
from collections.abc import Awaitable, Callable

import pytest
from pagestream_operator.api import EnginePool
from pagestream_operator.children import children
from pagestream_operator.errors import Conflict, NotLeading
from pagestream_operator.kube.apply import Applier, Outcome
from pagestream_operator.kube.client import KubeClient
from pagestream_operator.kube.kinds import DEPLOYMENT
from pagestream_operator.kube.lease import Leadership, LeaseSettings
from pagestream_operator.kube.ownership import SCALER
from pagestream_operator.kube.store import ObjectStore
from support.kubernetes.control_plane import ControlPlane
from support.kubernetes.operator_process import PoolWorld
from support.kubernetes.pool_objects import DEFAULTS

NAMES = LeaseSettings("fence", "fence", duration_s=2.0, renew_s=0.5, margin_s=0.5, look_s=0.2)
LIMIT_S = 20.0
Act = Callable[[KubeClient, Leadership, Applier], Awaitable[None]]


@pytest.fixture(scope="module")
def place(kube: ControlPlane) -> PoolWorld:
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
    kube: ControlPlane, place: PoolWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(kube.kubeconfig))
    pool = EnginePool.from_object(place.pool())
    manifest = children(pool, DEFAULTS)[-1]
    terms: list[int] = []

    async def apply(client: KubeClient, leadership: Leadership, applier: Applier) -> None:
        terms.append(leadership.term)
        assert await applier.apply(pool, manifest, replicas=1) is not Outcome.UNCHANGED

    async def freeze(client: KubeClient, leadership: Leadership, applier: Applier) -> None:
        await apply(client, leadership, applier)
        read = await client.get(DEPLOYMENT, place.namespace, "demo-engine")
        version = read["metadata"]["resourceVersion"]
        late = {"version": version, "manager": SCALER}
        with pytest.raises((Conflict, NotLeading)):  # noqa: PT012 - whichever notices first
            async with leadership.act():
                in_thread("next", apply)  # the check was passed; now time passes, and another one leads
                await client.apply_scale(DEPLOYMENT, place.namespace, "demo-engine", 9, **late)
        with pytest.raises(Conflict):
            await client.apply_scale(DEPLOYMENT, place.namespace, "demo-engine", 9, **late)

    await lead("first", freeze)
    assert terms == [terms[0], terms[0] + 1]
    assert place.replicas() == 1


async def test_who_does_not_lead_writes_nothing(
    kube: ControlPlane, place: PoolWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(kube.kubeconfig))
    pool = EnginePool.from_object(place.pool())
    async with KubeClient(5.0) as client:
        applier = Applier(client, ObjectStore(), Leadership(client, NAMES, "idle"))
        with pytest.raises(NotLeading):
            await applier.apply(pool, children(pool, DEFAULTS)[0], replicas=1)
        assert {verb for verb, _ in client.calls} == {"get"}
