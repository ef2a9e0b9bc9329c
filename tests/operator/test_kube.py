"""The API server as the operator calls it: access, calls, what was last seen, who owns which field."""

import asyncio
import copy
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import kopf
import pytest
from aiohttp import web
from pagestream_operator import ApiFailure, ApiUnavailable, Conflict, Gone, Rejected, SettingsError
from pagestream_operator.children import MANAGER
from pagestream_operator.kube import (
    DEFINITION,
    DEPLOYMENT,
    POD,
    POOL,
    SCALER,
    KubeClient,
    ListChanges,
    ObjectStore,
    Pod,
    PoolKey,
    differs,
    failure_of,
    find_access,
    fingerprint,
    owns_replicas,
    projection,
    taken_over,
)
from pagestream_scaling import PodState
from support.kubernetes.api import write_kubeconfig
from support.kubernetes.pool_objects import CREATED, deployment_body, pod_body, pool_body, stored


@pytest.fixture(autouse=True)
def nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a service account nor a kubeconfig."""
    monkeypatch.setattr(kopf, "login_with_service_account", lambda **_: None)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("KUBECONFIG", raising=False)


@pytest.mark.parametrize(
    ("host", "server"),
    [
        ("10.0.0.1", "https://10.0.0.1:6443"),
        ("fd00::1", "https://[fd00::1]:6443"),
        ("", "https://kubernetes.default.svc"),
    ],
)
def test_a_pod_reaches_the_server_by_its_address(host: str, server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    account = kopf.ConnectionInfo(server="https://kubernetes.default.svc", token="t")
    monkeypatch.setattr(kopf, "login_with_service_account", lambda **_: account)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", host)
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "6443")
    found = find_access()
    assert found.server == server
    assert found.as_http_headers() == {"Authorization": "Bearer t"}


def test_a_kubeconfig_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_kubeconfig(tmp_path / "config", "https://kube", token="secret")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    found = find_access()
    assert (found.server, found.token) == ("https://kube", "secret")


def test_no_access_is_an_error_that_says_what_to_set() -> None:
    with pytest.raises(SettingsError, match="set KUBECONFIG, or run in a pod"):
        find_access()


@pytest.mark.parametrize("text", ["", "x: [", "contexts: []", "current-context: none"])
def test_a_kubeconfig_that_is_none_is_named(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config").write_text(text)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    with pytest.raises(SettingsError, match="can't be read"):
        find_access()


def test_a_user_without_credentials_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """kopf knows no exec plugins: their users would call anonymously."""
    write_kubeconfig(tmp_path / "config", "https://kube", token="")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    with pytest.raises(SettingsError, match="exec plugins and tokenFile are not supported"):
        find_access()


async def test_certificates_that_are_not_there_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    account = kopf.ConnectionInfo(server="https://kube", token="t", ca_path=str(tmp_path / "none.crt"))
    monkeypatch.setattr(kopf, "login_with_service_account", lambda **_: account)
    with pytest.raises(SettingsError, match="certificates of the access"):
        async with KubeClient(1.0):
            pass


Handler = Callable[[web.Request], Awaitable[web.Response]]


@pytest.mark.parametrize(
    ("status", "message", "kind"),
    [
        (404, "", Gone),
        (409, "", Conflict),
        (408, "", ApiUnavailable),
        (429, "", ApiUnavailable),
        (500, "", ApiUnavailable),
        (503, "", ApiUnavailable),
        (504, "", ApiUnavailable),
        (401, "", ApiUnavailable),
        (400, "", Rejected),
        (403, "", Rejected),
        (422, "", Rejected),
        (500, "failed to create typed patch object (x): duplicate entries", Rejected),
        (500, "failed to convert new object (x) to proper version: quantities must match", Rejected),
        (500, 'failed calling webhook "x": connection refused', ApiUnavailable),
        *(
            (status, text, Rejected)
            for status in (400, 401, 403, 404, 409, 422, 429, 500, 503)
            for text in (
                'admission webhook "x" denied the request: no',
                "ValidatingAdmissionPolicy 'x' with binding 'y' denied request: no",
            )
        ),
    ],
)
def test_what_to_do_is_in_the_error(status: int, message: str, kind: type[ApiFailure]) -> None:
    failure = failure_of("get X", status, message)
    assert type(failure) is kind
    assert failure.status == status
    assert str(status) in str(failure)


@pytest.mark.parametrize(("behind_s", "found_s"), [(7200.0, 7200), (1.0, 0), (-7200.0, -7200)])
async def test_the_clock_of_the_api_server_is_known(kubeconfig: Path, behind_s: float, found_s: int) -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.json_response({})

    async with serving(answer, kubeconfig), KubeClient(5.0, lambda: time.time() - behind_s) as client:
        for _ in range(3):
            await client.get(POD, "default", "a")
            found = client.ahead_s
        assert abs(client.ahead_s - found_s) < 4
        assert client.ahead_s == found, "a difference that stays is one number"


@pytest.mark.parametrize(("given", "seconds"), [("7", 7.0), ("soon", None), (None, None)])
def test_a_busy_server_says_how_long(given: str | None, seconds: float | None) -> None:
    assert failure_of("get X", 429, "", given).retry_after_s == seconds


def test_paths_of_kinds() -> None:
    assert POD.path("ns") == "/api/v1/namespaces/ns/pods"
    assert DEPLOYMENT.path(None) == "/apis/apps/v1/deployments"
    assert DEPLOYMENT.path("ns", "demo", "scale") == "/apis/apps/v1/namespaces/ns/deployments/demo/scale"
    assert DEFINITION.path(None, "x") == "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/x"


def test_no_access_is_a_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", "/nowhere/kubeconfig")
    with pytest.raises(SettingsError, match="set KUBECONFIG, or run in a pod"):
        KubeClient(1.0)


@asynccontextmanager
async def serving(handler: Handler, kubeconfig: Path) -> AsyncIterator[str]:
    """A server that answers everything by one function; the kubeconfig names it, with the token `first`."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    server = f"http://127.0.0.1:{runner.addresses[0][1]}"
    write_kubeconfig(kubeconfig, server, token="first")
    try:
        yield server
    finally:
        await runner.cleanup()


@pytest.fixture
def kubeconfig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    return tmp_path / "kubeconfig"


async def test_a_token_that_was_renewed_is_read_again(kubeconfig: Path) -> None:
    seen: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        seen.append(request.headers["Authorization"])
        if request.headers["Authorization"] != "Bearer second":
            return web.json_response({"message": "no"}, status=401)
        return web.json_response({"kind": "Pod"})

    async with serving(answer, kubeconfig) as server, KubeClient(5.0) as client:
        with pytest.raises(ApiUnavailable, match="get Pod ns/a: 401 no"):
            await client.get(POD, "ns", "a")
        assert seen == ["Bearer first"]
        write_kubeconfig(kubeconfig, server, token="second")
        assert await client.get(POD, "ns", "a") == {"kind": "Pod"}
        assert seen == ["Bearer first", "Bearer first", "Bearer second"]
        assert client.calls == {("get", 401): 1, ("get", 200): 1}


async def test_all_calls_that_met_an_old_token_are_made_again(kubeconfig: Path) -> None:
    async def answer(request: web.Request) -> web.Response:
        if request.headers["Authorization"] == "Bearer first":
            await asyncio.sleep(0.05)  # all of them have asked by now
            write_kubeconfig(kubeconfig, server, token="second")
            return web.json_response({"message": "no"}, status=401)
        return web.json_response({"kind": "Pod"})

    async with serving(answer, kubeconfig) as server, KubeClient(5.0) as client:
        found = await asyncio.gather(*(client.get(POD, "ns", name) for name in "abcd"))
    assert found == [{"kind": "Pod"}] * 4


async def test_a_redirect_is_not_followed(kubeconfig: Path) -> None:
    async def answer(request: web.Request) -> web.Response:
        raise web.HTTPFound("/elsewhere")

    async with serving(answer, kubeconfig), KubeClient(5.0) as client:
        with pytest.raises(Rejected, match="302"):
            await client.get(POD, "ns", "a")


async def test_a_write_ends_at_the_server_first_and_asks_for_a_webhook_that_hangs(kubeconfig: Path) -> None:
    async def answer(request: web.Request) -> web.Response:
        limit = request.query.get("timeout", "none")
        return web.json_response({"message": f"no end within {limit}"}, status=504)

    async with serving(answer, kubeconfig), KubeClient(5.0) as client:
        with pytest.raises(ApiUnavailable, match="no end within 4000ms; does an admission webhook hang"):
            await client.merge(POD, "ns", "a", {}, manager="m")
        with pytest.raises(ApiUnavailable, match=r"no end within none$"):
            await client.get(POD, "ns", "a")


async def test_a_list_is_read_page_by_page(kubeconfig: Path) -> None:
    asked: list[dict[str, str]] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(dict(request.query))
        first: dict[str, Any] = {"items": [{"n": 1}], "metadata": {"continue": "more"}}
        return web.json_response({"items": [{"n": 2}]} if "continue" in request.query else first)

    async with serving(answer, kubeconfig), KubeClient(5.0) as client:
        named = {"apiVersion": "v1", "kind": "Pod"}
        assert await client.list(POD, None, "a=b,c") == [{**named, "n": 1}, {**named, "n": 2}]
    assert asked == [
        {"limit": "500", "labelSelector": "a=b,c"},
        {"limit": "500", "labelSelector": "a=b,c", "continue": "more"},
    ]


async def test_answers_that_are_no_objects_and_no_answers_are_outages(kubeconfig: Path) -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(text="<html>")

    async with serving(answer, kubeconfig), KubeClient(5.0) as client:
        with pytest.raises(ApiUnavailable, match="JSONDecodeError"):
            await client.get(POD, "ns", "a")
    async with KubeClient(5.0) as client:
        with pytest.raises(ApiUnavailable, match="get Pod ns/a: ClientConnectorError"):
            await client.get(POD, "ns", "a")
        assert client.calls == {("get", 0): 1}


async def test_a_call_has_a_limit(kubeconfig: Path) -> None:
    async def answer(_: web.Request) -> web.Response:
        await asyncio.Event().wait()
        raise AssertionError

    async with serving(answer, kubeconfig), KubeClient(0.1) as client:
        with pytest.raises(ApiUnavailable, match="Timeout"):
            await client.get(POD, "ns", "a")


@pytest.mark.parametrize(
    ("wanted", "live"),
    [
        ({"a": 1}, {"a": 1, "b": 2}),
        ({"a": {"b": [1, 2]}}, {"a": {"b": [1, 2], "c": 3}, "d": 4}),
        ({"env": [{"name": "A", "value": "1"}]}, {"env": [{"name": "A", "value": "1", "default": True}]}),
        ({"data": {}}, {}),
        ({"data": {}}, {"data": None}),
        ({"list": []}, {}),
    ],
)
def test_more_in_the_object_is_no_difference(wanted: dict[str, Any], live: dict[str, Any]) -> None:
    assert not differs(wanted, live)


@pytest.mark.parametrize(
    ("wanted", "live"),
    [
        ({"a": 1}, {}),
        ({"a": 1}, {"a": 2}),
        ({"a": [1]}, {"a": [1, 2]}),
        ({"a": [1, 2]}, {"a": [2, 1]}),
        ({"a": {"b": 1}}, {"a": 1}),
        ({"data": {}}, {"data": {"x": "1"}}),
        ({"cpu": "1000m"}, {"cpu": "1"}),
    ],
)
def test_differences(wanted: dict[str, Any], live: dict[str, Any]) -> None:
    assert differs(wanted, live)


def test_what_the_server_made_of_a_manifest_is_recognised() -> None:
    wanted = {"cpu": "1000m", "unknown": {"x": 1}}
    made = {"cpu": "1", "other": 5}
    assert fingerprint(wanted, made) == fingerprint(wanted, {**made, "other": 6})
    assert fingerprint(wanted, made) != fingerprint(wanted, {"cpu": "2"})
    assert fingerprint({"cpu": "1"}, made) != fingerprint(wanted, made)


def test_a_projection_has_only_what_was_asked_for() -> None:
    assert projection({"a": {"b": 1}, "l": [{"n": 1}]}, {"a": {"b": 2, "c": 3}, "l": [{"n": 4, "m": 5}]}) == {
        "a": {"b": 2},
        "l": [{"n": 4}],
    }


OURS = {"manager": MANAGER, "operation": "Apply", "fieldsV1": {"f:spec": {"f:strategy": {}}}}
SCALE = {"manager": SCALER, "operation": "Apply", "fieldsV1": {"f:spec": {"f:replicas": {}}}, "subresource": "scale"}
CONTROLLER = {
    "manager": "kube-controller-manager",
    "operation": "Update",
    "subresource": "status",
    "fieldsV1": {"f:status": {"f:replicas": {}}},
}


def live(*entries: dict[str, Any]) -> dict[str, Any]:
    return {"metadata": {"managedFields": copy.deepcopy(list(entries))}}


def foreign(fields: dict[str, Any]) -> dict[str, Any]:
    return {"manager": "kubectl", "operation": "Update", "fieldsV1": fields}


def test_who_owns_replicas() -> None:
    assert owns_replicas(live(OURS, SCALE), SCALER)
    assert not owns_replicas(live(OURS, SCALE), MANAGER)


def test_nothing_is_taken_where_nobody_has_put_anything() -> None:
    revision = foreign({"f:metadata": {"f:annotations": {"f:deployment.kubernetes.io/revision": {}}}})
    assert taken_over(live(OURS, SCALE, CONTROLLER, revision)) is None


def test_a_variable_of_somebody_elses_becomes_ours_to_take_out() -> None:
    env = {"f:template": {"f:spec": {"f:containers": {'k:{"name":"engine"}': {"f:env": {'k:{"name":"X"}': {}}}}}}}
    entries = taken_over(live(OURS, SCALE, foreign({"f:spec": env})))
    assert entries is not None
    assert [entry["manager"] for entry in entries] == [MANAGER, SCALER]
    assert entries[0]["fieldsV1"]["f:spec"] == {"f:strategy": {}, **env}


def test_replicas_and_asked_for_restarts_stay_with_whoever_set_them() -> None:
    restart = {"f:annotations": {".": {}, "f:kubectl.kubernetes.io/restartedAt": {}}}
    fields = {"f:spec": {"f:replicas": {}, "f:template": {"f:metadata": restart}}}
    assert taken_over(live(OURS, foreign(fields))) is None


def test_a_restart_beside_a_change_stays() -> None:
    annotations = {"f:annotations": {"f:kubectl.kubernetes.io/restartedAt": {}, "f:x": {}}}
    entries = taken_over(live(OURS, foreign({"f:spec": {"f:template": {"f:metadata": annotations}}})))
    assert entries is not None
    assert entries[1]["manager"] == "kubectl"
    kept = entries[1]["fieldsV1"]["f:spec"]["f:template"]["f:metadata"]["f:annotations"]
    assert kept == {"f:kubectl.kubernetes.io/restartedAt": {}}
    taken = entries[0]["fieldsV1"]["f:spec"]["f:template"]["f:metadata"]["f:annotations"]
    assert taken == {"f:x": {}}


def test_data_of_a_config_map_is_content() -> None:
    entries = taken_over(live({**OURS, "fieldsV1": {"f:metadata": {}}}, foreign({"f:data": {"f:X": {}}})))
    assert entries is not None
    assert entries[0]["fieldsV1"]["f:data"] == {"f:X": {}}


def test_the_object_itself_is_left_as_it_was() -> None:
    body = live(OURS, foreign({"f:data": {"f:X": {}}}))
    before = copy.deepcopy(body)
    taken_over(body)
    assert body == before


def test_a_ready_pod_says_since_when() -> None:
    pod = Pod.from_object(pod_body("a"))
    assert pod.state is PodState.READY
    assert pod.ready_s == datetime.fromisoformat(CREATED).timestamp() + 20
    assert pod.blocking_reason is None


@pytest.mark.parametrize(
    ("body", "state"),
    [
        (pod_body("a", ready=False), PodState.STARTING),
        (pod_body("a", ending=True), PodState.DRAINING),
        (pod_body("a", ready=False, ending=True), PodState.DRAINING),
    ],
)
def test_states(body: dict[str, Any], state: PodState) -> None:
    assert Pod.from_object(body).state is state


def test_a_container_that_waits_for_an_administrator_is_blocked() -> None:
    body = pod_body("a", ready=False)
    waiting = {"reason": "CrashLoopBackOff", "message": "back-off 10s"}
    body["status"]["containerStatuses"] = [{"state": {"waiting": waiting}}]
    assert Pod.from_object(body).blocking_reason == "CrashLoopBackOff: back-off 10s"


def test_an_init_container_that_waits_for_an_administrator_blocks_its_pod() -> None:
    body = pod_body("a", ready=False)
    waiting = {"reason": "ImagePullBackOff", "message": "no such image"}
    body["status"]["initContainerStatuses"] = [{"name": "mesh-init", "state": {"waiting": waiting}}]
    body["status"]["containerStatuses"] = [{"name": "engine", "state": {"waiting": {"reason": "PodInitializing"}}}]
    assert Pod.from_object(body).blocking_reason == "init container mesh-init: ImagePullBackOff: no such image"


def test_a_container_beside_the_engine_is_named_and_a_crash_says_how_it_ended() -> None:
    body = pod_body("a", ready=False)
    state = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s"}}
    ended = {"terminated": {"reason": "OOMKilled", "exitCode": 137}}
    body["status"]["containerStatuses"] = [{"name": "proxy", "state": state, "lastState": ended}]
    found = Pod.from_object(body).blocking_reason
    assert found == "container proxy: CrashLoopBackOff: back-off 10s (it ended by OOMKilled, exit code 137)"


@pytest.mark.parametrize("time", [{}, {"lastTransitionTime": None}, {"lastTransitionTime": ""}])
def test_a_ready_pod_without_a_time_is_ready_since_its_creation(time: dict[str, Any]) -> None:
    body = pod_body("a")
    body["status"]["conditions"] = [{"type": "Ready", "status": "True", **time}]
    pod = Pod.from_object(body)
    assert (pod.state, pod.ready_s) == (PodState.READY, pod.created_s)


def test_a_container_that_is_only_being_created_is_not_blocked() -> None:
    body = pod_body("a", ready=False)
    body["status"]["containerStatuses"] = [{"state": {"waiting": {"reason": "ContainerCreating"}}}]
    assert Pod.from_object(body).blocking_reason is None


def unscheduled(**condition: str) -> dict[str, Any]:
    body = pod_body("a", ready=False)
    body["status"]["conditions"].append({"type": "PodScheduled", "status": "False", **condition})
    return body


def test_a_pod_that_fits_nowhere_waits_and_is_not_late() -> None:
    pod = Pod.from_object(unscheduled(reason="Unschedulable", message="0/1 nodes"))
    assert (pod.blocking_reason, pod.waiting_reason, pod.scheduled_s) == (None, "0/1 nodes", None)
    an_hour_later = pod.created_s + 3600
    assert pod.observed(None, an_hour_later).created_s == an_hour_later


def test_a_pod_starts_when_it_gets_a_node() -> None:
    body = unscheduled()
    since = {"status": "True", "lastTransitionTime": "2026-01-01T01:00:00Z"}
    body["status"]["conditions"][-1] |= since
    pod = Pod.from_object(body)
    assert pod.scheduled_s == pod.observed(None, pod.created_s + 4000).created_s == pod.created_s + 3600
    body["status"]["conditions"][0] |= {"status": "True"}
    ready = Pod.from_object(body)
    assert ready.observed(None, ready.created_s + 4000).created_s == ready.created_s, "its start-up counts whole"


def test_a_pod_that_has_ended_is_terminated() -> None:
    body = pod_body("a")
    body["status"]["phase"] = "Failed"
    assert Pod.from_object(body).is_terminated


DEMO = PoolKey("default", "demo")


def test_a_change_is_told_to_its_pool() -> None:
    changed: list[PoolKey] = []
    store = ObjectStore(changed.append)
    store.put(POOL, stored(pool_body()))
    store.put(POD, pod_body("a"))
    store.put(DEPLOYMENT, deployment_body(1))
    assert changed == [DEMO] * 3
    assert store.pools() == [DEMO]


def test_what_comes_late_is_ignored() -> None:
    store = ObjectStore()
    assert store.put(DEPLOYMENT, deployment_body(3, version=8))
    assert not store.put(DEPLOYMENT, deployment_body(1, version=7))
    found = store.get(DEPLOYMENT, "default", "demo-engine")
    assert found is not None
    assert found["spec"]["replicas"] == 3


def test_the_same_version_may_say_more() -> None:
    """A write is remembered as far as it is known; the watch then brings the whole."""
    store = ObjectStore()
    store.put(DEPLOYMENT, deployment_body(3, version=8))
    assert store.put(DEPLOYMENT, deployment_body(3, version=8, readyReplicas=1))
    found = store.get(DEPLOYMENT, "default", "demo-engine")
    assert found is not None
    assert found["status"]["readyReplicas"] == 1


def test_pods_are_known_by_their_pool_and_forgotten() -> None:
    store = ObjectStore()
    store.put(POD, pod_body("b"))
    store.put(POD, pod_body("a", ready=False))
    store.put(POD, pod_body("other", "second"))
    assert [pod.name for pod in store.pods(DEMO)] == ["a", "b"]
    store.drop(POD, pod_body("a", version=2))
    assert [pod.name for pod in store.pods(DEMO)] == ["b"]


def test_the_end_of_an_object_is_not_that_of_its_successor() -> None:
    store = ObjectStore()
    store.put(POOL, stored(pool_body(), uid="new", version=9))
    store.drop(POOL, stored(pool_body(), uid="old", version=10))
    assert store.pools() == [DEMO]


def test_a_list_drops_what_it_does_not_show_and_keeps_what_came_since() -> None:
    store = ObjectStore()
    for name in ("a", "b"):
        store.put(POD, pod_body(name))
    before = store.versions(POD, "default")
    store.put(POD, pod_body("late"))
    assert store.apply_list(POD, [pod_body("b", version=5)], before) == ListChanges(dropped=1, rewound=0)
    assert [pod.name for pod in store.pods(DEMO)] == ["b", "late"]


def test_a_list_wins_over_memory_but_not_over_what_came_since() -> None:
    """Versions begin again lower when the API server's data is restored from a backup."""
    changed: list[PoolKey] = []
    store = ObjectStore(changed.append)
    store.put(DEPLOYMENT, deployment_body(3, version=200))
    store.put(POD, pod_body("a", version=201))
    store.put(POD, pod_body("b", version=202))
    known = {kind: store.versions(kind, "default") for kind in (DEPLOYMENT, POD)}
    store.put(POD, pod_body("b", version=203))
    changed.clear()
    assert store.apply_list(DEPLOYMENT, [deployment_body(1, version=100)], known[DEPLOYMENT]).rewound == 1
    older = [pod_body("a", ready=False, version=90), pod_body("b", ready=False, version=91)]
    assert store.apply_list(POD, older, known[POD]) == ListChanges(dropped=0, rewound=1)
    found = store.get(DEPLOYMENT, "default", "demo-engine")
    assert found is not None
    assert found["spec"]["replicas"] == 1
    assert [pod.state for pod in store.pods(DEMO)] == [PodState.STARTING, PodState.READY]
    assert changed == [DEMO, DEMO]
    assert store.put(DEPLOYMENT, deployment_body(2, version=101)), "what follows the backup is newer"


def test_an_object_that_was_made_again_before_the_backup_is_the_old_one_once_more() -> None:
    store = ObjectStore()
    store.put(POOL, stored(pool_body(), uid="new", version=200))
    changes = store.apply_list(POOL, [stored(pool_body(), uid="old", version=100)], store.versions(POOL, None))
    assert changes == ListChanges(dropped=0, rewound=1)
    found = store.get(POOL, "default", "demo")
    assert found is not None
    assert found["metadata"]["uid"] == "old"


def test_a_pod_whose_label_names_another_pool_is_that_ones() -> None:
    changed: list[PoolKey] = []
    store = ObjectStore(changed.append)
    store.put(POD, pod_body("a"))
    store.put(POD, pod_body("a", "second", version=2))
    assert store.pods(DEMO) == []
    assert [pod.name for pod in store.pods(PoolKey("default", "second"))] == ["a"]
    assert changed == [DEMO, DEMO, PoolKey("default", "second")]


def test_what_cannot_be_read_is_named_at_its_pool_until_it_can_be_or_is_gone() -> None:
    store = ObjectStore()
    odd = pod_body("odd")
    odd["metadata"]["labels"]["pagestream.dev/nodes"] = "many"
    assert store.put(POD, odd), "it runs, and counts"
    nameless = pod_body("nameless")
    nameless["metadata"]["uid"] = None
    assert not store.put(POD, nameless)
    assert [pod.num_nodes for pod in store.pods(DEMO)] == [1]
    assert store.oddities(DEMO) == [
        "Pod default/nameless: it can't be read (it lacks a namespace, a name or a uid)",
        "Pod default/odd: label pagestream.dev/nodes is 'many', 1 to 64 is expected",
    ]
    store.drop(POD, nameless)
    store.put(POD, pod_body("odd", version=2))
    assert store.oddities(DEMO) == []
    assert store.unreadable == {"Pod": 2}


def test_a_list_of_one_kind_drops_no_other() -> None:
    store = ObjectStore()
    store.put(POOL, stored(pool_body(), uid="same"))
    store.put(DEPLOYMENT, {**deployment_body(1), "metadata": {**deployment_body(1)["metadata"], "uid": "same"}})
    assert store.apply_list(DEPLOYMENT, [], {"same": 1}).dropped == 1
    assert store.pools() == [DEMO]


def test_versions_are_those_of_a_namespace_or_all() -> None:
    store = ObjectStore()
    store.put(POD, pod_body("a"))
    assert store.versions(POD, "default") == store.versions(POD, None) == {"a-uid": 1}
    assert store.versions(POD, "elsewhere") == {}
