"""What a replica sees decides what it does: watches begin again whatever ended them, one namespace is no other one's
fault, and who sees more leads.
"""

import asyncio
import http.client
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml
from pagestream_operator import load_settings
from pagestream_operator.app import App
from pagestream_telemetry import TelemetrySettings
from support.kubernetes.api import write_kubeconfig
from support.kubernetes.chart import render
from support.kubernetes.control_plane import ControlPlane, eventually
from support.kubernetes.operator_process import (
    OperatorProcess,
    PoolWorld,
    install_definition,
    running_operator,
    started_operator,
)
from support.processes.stack import free_port
from support.processes.waiting import LIMIT_S, until, wait_until

pytestmark = pytest.mark.kube

RELEASE = "rel"
LEASE = f"{RELEASE}-operator"
QUICK = {
    "LEASE_NAME": LEASE,
    "LEASE_DURATION_S": "5",
    "LEASE_RENEW_S": "1",
    "LEASE_MARGIN_S": "1",
    "LEASE_LOOK_S": "0.5",
    "WATCH_S": "2",
}
DEFINITION = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/enginepools.pagestream.dev"
BINDINGS = "/apis/rbac.authorization.k8s.io/v1/namespaces/{}/rolebindings"


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """An API server without controllers, whose definition and rights the tests take away."""
    with ControlPlane(tmp_path_factory.mktemp("bare"), controllers=False) as kube:
        install_definition(kube)
        yield kube


def account(kube: ControlPlane, namespace: str, *served: str) -> Path:
    """The access of the chart's operator in a namespace, with its rights for the namespaces that it serves."""
    parts = ("-s", "templates/operator/rbac.yaml", "-s", "templates/operator/lease.yaml")
    options = ("--set", f"operator.namespaces={{{','.join(served)}}}", *parts)
    made = render(*options, release=RELEASE, namespace=namespace)
    for each in made:
        each["metadata"].setdefault("namespace", namespace)
    file = kube.folder / f"{namespace}-rights.yaml"
    file.write_text(yaml.safe_dump_all(made))
    kube.kubectl("apply", "-f", str(file))
    token = kube.kubectl("create", "token", "-n", namespace, LEASE).strip()
    write_kubeconfig(kube.folder / f"{namespace}.kubeconfig", kube.url, token=token)
    return kube.folder / f"{namespace}.kubeconfig"


def is_served(world: PoolWorld, name: str) -> Callable[[], bool]:
    return lambda: bool(world.kube.exists(world.path("deployments", f"{name}-engine")))


def health(operator: OperatorProcess) -> dict[str, str]:
    """What /healthz says of each namespace."""
    lines = operator.page("/healthz")[1].splitlines()[1:]
    return dict(line.split(": ", maxsplit=1) for line in lines)


def in_process(kube: ControlPlane, namespace: str, patch: pytest.MonkeyPatch, **given: str) -> App:
    """A replica that runs in this process."""
    patch.setenv("KUBECONFIG", str(kube.kubeconfig))
    own = {"NAMESPACES": namespace, "POD_NAMESPACE": namespace, "METRICS_HOST": "127.0.0.1", "OTLP_HOST": "127.0.0.1"}
    own |= {"METRICS_PORT": "0", "OTLP_PORT": "0", "WATCH_S": "2", **given}
    settings = load_settings({f"PAGESTREAM_OPERATOR__{name}": value for name, value in own.items()})
    return App(settings, TelemetrySettings(), os.environ)


def threads_of_kopf() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("kopf")]


async def test_kopf_leaves_no_thread_behind(bare: ControlPlane, monkeypatch: pytest.MonkeyPatch) -> None:
    """By itself it waits for ever for watches that wait for a login, once one of them has met a 404."""
    PoolWorld(bare, "threads")
    port, stop = free_port(), asyncio.Event()
    running = asyncio.create_task(in_process(bare, "threads", monkeypatch, METRICS_PORT=str(port)).run(stop))

    def answers(status: int, text: str) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT_S)
        try:
            connection.request("GET", "/healthz" if status == 200 else "/readyz")
            answer = connection.getresponse()
            return answer.status == status and text in answer.read().decode()
        except OSError:
            return False
        finally:
            connection.close()

    async def until_answered(status: int, text: str) -> None:
        await asyncio.to_thread(wait_until, lambda: answers(status, text), text, LIMIT_S)

    await until_answered(200, "EnginePool watch")
    assert threads_of_kopf()
    await asyncio.to_thread(bare.delete, DEFINITION)
    await until_answered(503, "the definition of EnginePool")
    await until(lambda: not threads_of_kopf(), "the end of kopf")
    await asyncio.to_thread(wait_until, lambda: not bare.exists(DEFINITION), "the definition is gone", LIMIT_S)
    await asyncio.to_thread(install_definition, bare)
    await until_answered(200, "EnginePool watch")
    stop.set()
    await asyncio.wait_for(running, LIMIT_S)
    await until(lambda: not threads_of_kopf(), "the end of kopf")


def test_watches_begin_again_when_the_definition_was_made_again(bare: ControlPlane) -> None:
    world = PoolWorld(bare, "again")
    with running_operator(bare, world.namespace, **QUICK) as operator:
        eventually(operator.leads, "a leader")
        world.create("first", replicas=0, drain={"deletionTimeoutSeconds": 0, "whenDeleted": "Keep"})
        world.wait_condition("Ready", "ScaledToZero", "first")
        assert "EnginePool event" in health(operator)[world.namespace]
        bare.delete(DEFINITION)
        eventually(lambda: operator.page("/readyz")[0] == 503, "it sees nothing")
        assert "the definition of EnginePool" in operator.page("/readyz")[1]
        eventually(lambda: not bare.exists(DEFINITION), "the definition is gone")
        eventually(lambda: not operator.leads(), "what sees nothing doesn't lead")
        install_definition(bare)
        world.create("second", replicas=1)
        eventually(is_served(world, "second"), "the new pool is served")
        assert operator.page("/healthz")[0] == 200
        assert operator.figures("pagestream_operator_watch_starts_total")[f'k8s_namespace_name="{world.namespace}"'] > 1


def test_a_namespace_without_rights_concerns_no_other_one(bare: ControlPlane) -> None:
    ops, team = PoolWorld(bare, "ops"), PoolWorld(bare, "team")
    access = account(bare, "ops", "ops", "team")
    with running_operator(bare, "ops,team", kubeconfig=access, **QUICK) as operator:
        eventually(operator.leads, "a leader")
        team.create("before", replicas=1)
        eventually(is_served(team, "before"), "the team's pool is served")
        binding = f"{BINDINGS.format('team')}/{LEASE}"
        kept = bare.get(binding)
        bare.delete(binding)
        eventually(lambda: health(operator)["team"].startswith("not seen"), "it says so")
        assert "the right to list" in health(operator)["team"]
        assert health(operator)["ops"].startswith("seen")
        assert operator.page("/readyz")[0] == 200
        ops.create("meanwhile", replicas=1)
        eventually(is_served(ops, "meanwhile"), "the other namespace is served")
    # Nor does it concern the start.
    with running_operator(bare, "ops,team", kubeconfig=access, **QUICK) as operator:
        ops.create("started", replicas=1)
        eventually(is_served(ops, "started"), "the other namespace is served from the start")
        team.change({"replicas": 3}, "before")
        bare.post(BINDINGS.format("team"), {key: kept[key] for key in ("roleRef", "subjects")} | _named(LEASE))
        team.wait_replicas(3, "before")
        eventually(lambda: health(operator)["team"].startswith("seen"), "it says so")


def _named(name: str) -> dict[str, Any]:
    return {"metadata": {"name": name}}


@pytest.mark.slow
def test_an_account_that_is_made_anew_is_used(bare: ControlPlane) -> None:
    """Its former token gets 401s, which neither kopf nor a retry helps; the file has another one after a while."""
    world = PoolWorld(bare, "renewed")
    access = account(bare, world.namespace, world.namespace)
    with running_operator(bare, world.namespace, kubeconfig=access, **QUICK) as operator:
        eventually(operator.leads, "a leader")
        world.create("demo", replicas=1)
        eventually(is_served(world, "demo"), "the pool is served")
        bare.delete(f"/api/v1/namespaces/{world.namespace}/serviceaccounts/{LEASE}")
        eventually(lambda: operator.page("/readyz")[0] == 503, "it sees nothing")
        assert operator.page("/healthz")[0] == 200
        account(bare, world.namespace, world.namespace)
        eventually(operator.leads, "it leads again")
        world.change({"replicas": 3}, "demo")
        world.wait_replicas(3, "demo")


def test_the_lease_goes_to_the_replica_that_sees_more(bare: ControlPlane) -> None:
    ops, team = PoolWorld(bare, "few"), PoolWorld(bare, "many")
    access = account(bare, "few", "few")
    settings = {**QUICK, "POD_NAMESPACE": "few"}
    with ExitStack() as stack:
        blind = stack.enter_context(started_operator(bare, "many", "blind", kubeconfig=access, **settings))
        some = stack.enter_context(running_operator(bare, "few,many", "some", kubeconfig=access, **settings))
        eventually(some.leads, "what sees some leads")
        ops.create("demo", replicas=1)
        eventually(is_served(ops, "demo"), "what it sees is served")
        every = stack.enter_context(running_operator(bare, "few,many", "every", **settings))
        team.create("demo", replicas=1)
        eventually(is_served(team, "demo"), "who sees all has the lease")
        eventually(lambda: every.leads() and not some.leads(), "there is one leader")
        assert blind.page("/readyz")[0] == 503
        assert not blind.leads()
        assert (
            int(bare.get(f"/apis/coordination.k8s.io/v1/namespaces/few/leases/{LEASE}")["spec"]["leaseTransitions"])
            == 2
        )


async def test_a_task_that_ends_is_noticed(bare: ControlPlane, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever of a replica's tasks is cancelled from outside: it runs again, or the process ends."""
    world = PoolWorld(bare, "killed")
    world.create("demo", replicas=0)
    source = {"PROMETHEUS_URL": "http://127.0.0.1:9"}
    pool, watches, repair = "pool PoolKey(", "watches of killed", "repair of watches of killed"

    def named(name: str) -> list[asyncio.Task[Any]]:
        return [task for task in asyncio.all_tasks() if task.get_name().startswith(name)]

    async def killed(running: asyncio.Task[None], name: str) -> bool:
        """Cancel a task; returns whether the replica goes on, with another one in its place."""
        await until(lambda: bool(named(name)), name)
        [task] = named(name)
        task.cancel()
        await until(task.done, "its end")
        await until(lambda: running.done() or any(each is not task for each in named(name)), "what follows")
        return not running.done()

    stop = asyncio.Event()
    running = asyncio.create_task(in_process(bare, "killed", monkeypatch, **source).run(stop))
    assert [await killed(running, name) for name in (pool, watches, repair, "watcher of killed", pool)] == [True] * 5
    stop.set()
    await asyncio.wait_for(running, LIMIT_S)
    for name in ("heartbeat", "watches", "leadership", "pools", "prometheus"):
        running = asyncio.create_task(in_process(bare, "killed", monkeypatch, **source).run(asyncio.Event()))
        await until(lambda: bool(named("pools")), "its tasks")
        [task] = [each for each in named(name) if each.get_name() == name]
        task.cancel()
        with pytest.raises(ExceptionGroup, match="unhandled errors") as ended:
            await asyncio.wait_for(running, LIMIT_S)
        assert name in str(ended.value.exceptions[0])
    await until(lambda: not threads_of_kopf(), "the end of kopf")
