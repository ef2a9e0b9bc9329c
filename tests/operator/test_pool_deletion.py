"""The operator's process against an API server in memory: how pools that are being deleted unpublish their models.

`kube/test_reconcile.py` has a real API server, which few machines have.
"""

import asyncio
import copy
import itertools
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from pagestream_operator.api import API_VERSION, GROUP, PLURAL
from support.kubernetes.api import write_kubeconfig
from support.kubernetes.pool_objects import pool_body
from support.processes.waiting import LIMIT_S
from support.protocol.token_streams import eventually

pytestmark = pytest.mark.served

RELEASE = "home.pagestream"
RESOURCES = {
    "api/v1": ("configmaps", "services", "serviceaccounts", "pods", "namespaces", "events"),
    "apis/apiextensions.k8s.io/v1": ("customresourcedefinitions",),
    "apis/policy/v1": ("poddisruptionbudgets",),
    "apis/apps/v1": ("deployments", "statefulsets"),
    f"apis/{API_VERSION}": (PLURAL,),
}
"""What the operator watches and kopf looks for, by API version."""
Body = dict[str, Any]


class ApiServer:
    """Objects by their paths, with versions, finalizers and watches; no validation, no controllers."""

    def __init__(self) -> None:
        self.objects: dict[str, Body] = {"api/v1/namespaces/default": {"metadata": {"name": "default"}}}
        self.url = ""
        self._versions = itertools.count(1)
        self._watches: defaultdict[str, list[asyncio.Queue[Body]]] = defaultdict(list)

    def put(self, path: str, body: Body, change: str = "MODIFIED") -> Body:
        """Store an object as its next version, and show it to watches."""
        body["metadata"]["resourceVersion"] = str(next(self._versions))
        self.objects[path] = body
        if body["metadata"].get("deletionTimestamp") and not body["metadata"].get("finalizers"):
            del self.objects[path]
            change = "DELETED"
        for watch in self._watches[path.rpartition("/")[0]]:
            watch.put_nowait({"type": change, "object": copy.deepcopy(body)})
        return body

    def add(self, path: str, body: Body) -> Body:
        """Store a new object."""
        body.setdefault("metadata", {}).setdefault("creationTimestamp", now())
        body["metadata"].setdefault("uid", f"uid of {path}")
        return self.put(path, body, "ADDED")

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Answer a call."""
        path = request.path.strip("/")
        if request.method == "GET" and "/namespaces/" not in path:
            return web.json_response(discovered(path))
        if request.method == "GET" and len(path.partition("/namespaces/")[2].split("/")) == 2:
            return await self._watch(request, path) if "watch" in request.query else self._list(path)
        given = await request.json() if request.can_read_body else {}
        if request.method == "POST":
            path = f"{path}/{given['metadata'].get('name') or given['metadata'].get('generateName')}"
            return web.json_response(self.add(path, given))
        subresource = path.endswith("/status")
        path = path.removesuffix("/status")
        if path not in self.objects:
            return web.json_response({"message": "not found"}, status=404)
        if request.method == "GET":
            return web.json_response(self.objects[path])
        changed = copy.deepcopy(self.objects[path])
        if subresource:
            changed["status"] = given["status"]
        else:
            metadata = {**changed["metadata"], **given["metadata"]}
            left = {name: value for name, value in metadata.items() if value is not None}
            changed = {**changed, **given, "metadata": left}
        return web.json_response(self.put(path, changed))

    def _list(self, path: str) -> web.Response:
        items = [body for each, body in self.objects.items() if each.rpartition("/")[0] == path]
        return web.json_response({"items": items, "metadata": {"resourceVersion": "1"}})

    async def _watch(self, request: web.Request, path: str) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        events = asyncio.Queue[Body]()
        self._watches[path].append(events)
        while True:
            await response.write(json.dumps(await events.get()).encode() + b"\n")


def now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def discovered(path: str) -> Body:
    """Return which kinds there are."""
    if path == "api":
        return {"versions": ["v1"]}
    if path == "apis":
        groups = [version.split("/")[1:] for version in RESOURCES if version.startswith("apis/")]
        versions = [(name, {"version": version}) for name, version in groups]
        return {"groups": [{"name": name, "versions": [one], "preferredVersion": one} for name, one in versions]}
    verbs = ["list", "watch", "patch"]
    common = {"namespaced": True, "verbs": verbs, "singularName": "", "shortNames": [], "categories": []}
    return {"resources": [{"name": name, "kind": name.title(), **common} for name in RESOURCES[path]]}


@pytest.fixture
async def api() -> AsyncIterator[ApiServer]:
    api = ApiServer()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", api.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    api.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield api
    await runner.cleanup()


def pool_path(name: str) -> str:
    return f"apis/{API_VERSION}/namespaces/default/{PLURAL}/{name}"


def job_path(name: str) -> str:
    return f"apis/batch/v1/namespaces/default/jobs/{name}-unpublish"


def add_pool(api: ApiServer, name: str, *, card: str | None = "c", deleted: bool = True, **spec: Any) -> None:
    model = {"source": {"path": "/models/demo"}, "servedName": name}
    body = pool_body(name, **{"model": model, **spec})
    body["status"] = {"controllerClass": RELEASE, **({} if card is None else {"publishedCard": card})}
    if deleted:
        body["metadata"] |= {"deletionTimestamp": now(), "finalizers": [f"{GROUP}/drain"]}
    api.add(pool_path(name), body)


def end_job(api: ApiServer, name: str, kind: str, message: str = "") -> None:
    job = copy.deepcopy(api.objects[job_path(name)])
    job["status"] = {"conditions": [{"type": kind, "status": "True", "message": message}]}
    api.put(job_path(name), job)


async def test_a_deleted_pool_unpublishes_its_models_and_no_others(api: ApiServer, tmp_path: Path) -> None:
    shared = {"source": {"path": "/models/demo"}, "servedName": "shared"}
    own = {"source": {"path": "/models/own"}, "servedName": "own"}
    add_pool(api, "main", deleted=False, paused=True, model=shared)
    add_pool(api, "canary", model=shared, models=[own])
    add_pool(api, "fails")
    add_pool(api, "taken")
    add_pool(api, "keeps", drain={"whenDeleted": "Keep"})
    add_pool(api, "unknown", card=None)
    add_pool(api, "twin", model=shared)
    former = {"name": "taken-unpublish", "ownerReferences": [{"uid": "a former pool's"}]}
    api.add(job_path("taken"), {"metadata": former})
    write_kubeconfig(tmp_path / "kubeconfig", api.url, token="none")
    settings = {"NAMESPACES": "default", "RELEASE": RELEASE, "DECIDE_S": "0.2", "RESYNC_S": "0"}
    settings |= {"METRICS_HOST": "127.0.0.1", "METRICS_PORT": "0", "OTLP_HOST": "127.0.0.1", "OTLP_PORT": "0"}
    environment = {f"PAGESTREAM_OPERATOR__{name}": value for name, value in settings.items()}
    with (tmp_path / "log").open("wb") as log:
        operator = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "pagestream_operator"),
            env={**os.environ, **environment, "KUBECONFIG": str(tmp_path / "kubeconfig")},
            stdout=log,
            stderr=log,
        )
    try:
        gone = {pool_path(name) for name in ("keeps", "unknown", "twin")}
        jobs = {job_path(name) for name in ("canary", "fails")}
        await eventually(lambda: gone.isdisjoint(api.objects) and jobs <= api.objects.keys())
        assert {path for path in api.objects if "/jobs/" in path} == {job_path("taken"), *jobs}
        [container] = api.objects[job_path("canary")]["spec"]["template"]["spec"]["containers"]
        assert container["args"][:2] == ["own", "--wait"]
        owners = api.objects[job_path("canary")]["metadata"]["ownerReferences"]
        assert [owner["uid"] for owner in owners] == [f"uid of {pool_path('canary')}"]
        end_job(api, "canary", "Complete")
        end_job(api, "fails", "Failed", "exit code 3")
        await eventually(lambda: {pool_path("canary"), pool_path("fails")}.isdisjoint(api.objects))
        assert {pool_path("main"), pool_path("taken")} <= api.objects.keys(), "the Job of a former pool is to end first"
        notes = [body["note"] for body in api.objects.values() if body.get("reason") == "UnpublishFailed"]
        assert len(notes) == 1
        assert "pagestream models rm fails" in notes[0]
        assert "exit code 3" in notes[0]
    finally:
        operator.kill()
        print((tmp_path / "log").read_text())
        await asyncio.wait_for(operator.wait(), LIMIT_S)
