"""Tasks that should run for as long as the operator does, and watches that begin again. No cluster is needed."""

import asyncio
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any, cast

import kopf
import pytest
from pagestream_operator import Conflict, Gone
from pagestream_operator.kube import (
    POD,
    POOL,
    Kind,
    KubeClient,
    Leadership,
    LeaseSettings,
    ObjectStore,
    PoolKey,
    Sees,
    Sight,
    Watcher,
)
from pagestream_operator.supervision import run_together, supervised
from support.kubernetes.pool_objects import pod_body
from support.processes.waiting import LIMIT_S, until


async def test_work_that_ends_is_done_again(caplog: pytest.LogCaptureFixture) -> None:
    stop, ends = asyncio.Event(), Counter[str]()

    async def cancelled_elsewhere() -> None:
        other = asyncio.create_task(asyncio.sleep(LIMIT_S))
        asyncio.get_running_loop().call_soon(other.cancel)
        await other

    async def work() -> None:
        number = ends["work"]
        if number == 0:
            raise KeyError("odd")
        if number == 1:
            await cancelled_elsewhere()
        if number == 3:
            stop.set()

    async with asyncio.timeout(LIMIT_S):
        await supervised("work", work, stop, ends=ends, pause_s=0)
    assert ends["work"] == 3
    assert [record.message for record in caplog.records] == [
        "work has failed, and is started again",
        "work was cancelled from inside, and is started again",
        "work has ended, and is started again",
    ]


async def test_a_task_that_is_cancelled_from_outside_ends_those_beside_it() -> None:
    stop, begun = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        begun.set()
        await stop.wait()

    running = asyncio.create_task(run_together({"one": work, "other": work}, stop))
    await begun.wait()
    next(task for task in asyncio.all_tasks() if task.get_name() == "one").cancel()
    with pytest.raises(ExceptionGroup) as ended:
        await asyncio.wait_for(running, LIMIT_S)
    assert "one" in str(ended.value.exceptions[0])


class Lists:
    """In place of a client: lists what it is given."""

    def __init__(self, objects: dict[Kind, list[dict[str, Any]]] | None = None) -> None:
        self.objects = objects or {}
        self.listed: list[Kind] = []
        self.places: list[tuple[Kind, str | None]] = []
        """The same with the namespaces."""

    async def list(self, kind: Kind, namespace: str | None, selector: str | None = None) -> list[dict[str, Any]]:
        self.listed.append(kind)
        self.places.append((kind, namespace))
        return self.objects.get(kind, [])


class Kopf:
    """In place of kopf's operator, as which it ends: one task waits for the flag in a thread, and another one fails."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error
        self.runs = 0

    async def __call__(self, *, stop_flag: threading.Event, **_: object) -> None:
        self.runs += 1
        waiting = asyncio.create_task(asyncio.to_thread(stop_flag.wait))
        if self.error is None:
            await waiting
            return
        await asyncio.sleep(0.05)
        waiting.cancel()
        raise self.error


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    for pause in ("_RESTART_S", "_SETTLE_S"):
        monkeypatch.setattr(sys.modules[Watcher.__module__], pause, 0.05)


@pytest.fixture
def stop() -> Iterator[asyncio.Event]:
    found = asyncio.Event()
    yield found
    found.set()


@pytest.mark.parametrize("error", [RuntimeError("a watch has failed nine times"), SystemExit(3), KeyError("uid")])
async def test_kopf_is_started_again_whatever_it_ends_with(
    monkeypatch: pytest.MonkeyPatch, stop: asyncio.Event, error: BaseException
) -> None:
    failing = Kopf(error)
    monkeypatch.setattr(kopf, "operator", failing)
    watcher = Watcher(cast(KubeClient, Lists()), ObjectStore(), None, kopf.OperatorRegistry(), resync_s=0)
    running = asyncio.create_task(watcher.run(stop))
    await until(lambda: failing.runs == 2, "another run")
    stop.set()
    await asyncio.wait_for(running, LIMIT_S)
    assert watcher.num_runs >= 2


async def test_an_object_that_cannot_be_read_hides_no_other_one(
    monkeypatch: pytest.MonkeyPatch, stop: asyncio.Event
) -> None:
    monkeypatch.setattr(kopf, "operator", Kopf(None))
    seen = asyncio.Event()
    odd = {**pod_body("odd"), "metadata": {"name": None}}
    client, store = Lists({POD: [pod_body("good"), odd]}), ObjectStore()
    sight = Sight(cast(KubeClient, client), store, ("default",), kopf.OperatorRegistry(), resync_s=0, on_sight=seen.set)
    assert sight.extent is Sees.NOTHING
    assert "starting" in sight.problem()
    running = asyncio.create_task(sight.run(stop))
    await asyncio.wait_for(seen.wait(), LIMIT_S)
    assert sight.extent is Sees.ALL
    assert sight.shows("default")
    assert not sight.shows("other")
    assert [pod.name for pod in store.pods(PoolKey("default", "demo"))] == ["good"]
    client.listed.clear()
    sight.suspect("default", POD)
    sight.suspect("default", POOL)
    await until(lambda: {POD, POOL} <= set(client.listed), "the lists")
    stop.set()
    await asyncio.wait_for(running, LIMIT_S)


@pytest.mark.parametrize("namespaces", [None, ("one", "two")])
async def test_a_kind_is_listed_again_in_the_namespace_where_it_was_wrong(
    monkeypatch: pytest.MonkeyPatch, stop: asyncio.Event, namespaces: tuple[str, ...] | None
) -> None:
    monkeypatch.setattr(kopf, "operator", Kopf(None))
    client, seen = Lists({POD: [pod_body("good")]}), asyncio.Event()
    store = ObjectStore()
    sight = Sight(cast(KubeClient, client), store, namespaces, kopf.OperatorRegistry(), resync_s=0, on_sight=seen.set)
    running = asyncio.create_task(sight.run(stop))
    await asyncio.wait_for(seen.wait(), LIMIT_S)
    await until(lambda: sight.extent is Sees.ALL, "all namespaces are seen")
    client.places.clear()
    client.objects.clear()
    sight.suspect("one", POD)
    await until(lambda: bool(client.places), "the list")
    assert client.places == [(POD, "one")]
    assert len(store.pods(PoolKey("default", "demo"))) == 1, "what lies in other namespaces is left alone"
    stop.set()
    await asyncio.wait_for(running, LIMIT_S)


@pytest.mark.slow
async def test_watches_of_which_nothing_is_heard_are_started_again(
    monkeypatch: pytest.MonkeyPatch, stop: asyncio.Event
) -> None:
    silent = Kopf(None)
    monkeypatch.setattr(kopf, "operator", silent)
    client, store = cast(KubeClient, Lists()), ObjectStore()
    watcher = Watcher(client, store, None, kopf.OperatorRegistry(), resync_s=0, watch_s=0.01)
    running = asyncio.create_task(watcher.run(stop))
    await until(lambda: silent.runs == 2, "another run")
    stop.set()
    await asyncio.wait_for(running, LIMIT_S)


class _Leases:
    """The calls of `KubeClient` for one Lease, which somebody deletes while it is renewed."""

    def __init__(self) -> None:
        self.body: dict[str, Any] | None = None
        self.num_made = 0
        self.was_made_again = asyncio.Event()

    async def get(self, *_: object) -> dict[str, Any]:
        if self.body is None:
            raise Gone("no Lease", 404)
        return self.body

    async def create(self, _: Kind, body: dict[str, Any]) -> dict[str, Any]:
        self.num_made += 1
        if self.num_made > 1:
            self.was_made_again.set()
        self.body = {**body, "metadata": {**body["metadata"], "resourceVersion": str(self.num_made)}}
        return self.body

    async def replace(self, _: Kind, body: dict[str, Any]) -> dict[str, Any]:
        if self.num_made > 1:
            return body
        self.body = None
        raise Conflict("it was deleted meanwhile", 409)


async def test_a_lease_that_goes_while_it_is_renewed_is_made_again() -> None:
    leases, stop = _Leases(), asyncio.Event()
    times = LeaseSettings("home", "lease", duration_s=30.0, renew_s=0.01, margin_s=1.0, look_s=0.01)
    leadership = Leadership(cast("KubeClient", leases), times, "one")
    running = asyncio.create_task(leadership.run(stop))
    made_again = asyncio.create_task(leases.was_made_again.wait())
    await asyncio.wait({running, made_again}, timeout=LIMIT_S, return_when=asyncio.FIRST_COMPLETED)
    assert leases.was_made_again.is_set()
    assert not running.done(), "no error has ended it"
    stop.set()
    await running
    made_again.cancel()
