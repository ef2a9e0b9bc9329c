"""Passes over one pool against objects in memory: what fails, and what is odd, is chosen by the test."""

from __future__ import annotations

import copy
import itertools
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, cast

from pagestream_operator import Conflict, Gone
from pagestream_operator.kube import (
    DEPLOYMENT,
    NAMESPACE,
    POD,
    POOL,
    Applier,
    Kind,
    KubeClient,
    Leadership,
    ObjectStore,
    PoolKey,
    Recorder,
)
from pagestream_operator.metrics import MetricsStore
from pagestream_operator.pool import Budgets, Context, Reconciler
from support.kubernetes.pool_objects import DEFAULTS, pool_body

FINALIZER = "pagestream.dev/drain"
START_S = 1_800_000_000.0
Object = dict[str, Any]
Fault = Callable[[str, Kind, str], Exception | None]
"""What a call meets, by its verb, the kind and the name of the object; None: nothing."""


class MemoryClient:
    """The calls of `KubeClient`, on objects in memory."""

    def __init__(self) -> None:
        self.ahead_s = 0.0
        self.objects: dict[tuple[str, str], Object] = {}
        """By kind and name."""
        self.fault: Fault = lambda *_: None
        self.tries: list[tuple[str, str]] = []
        """Verbs and kinds of all calls."""
        self._versions = itertools.count(1)

    def keep(self, kind: Kind, body: Mapping[str, Any]) -> Object:
        """Store an object as its next version."""
        kept = copy.deepcopy(dict(body))
        metadata = kept.setdefault("metadata", {})
        metadata.setdefault("uid", f"{kind.name}-{metadata['name']}")
        metadata.setdefault("namespace", "default")
        metadata.setdefault("creationTimestamp", "2027-01-15T08:00:00Z")
        metadata["resourceVersion"] = str(next(self._versions))
        if kind is DEPLOYMENT:
            metadata["generation"] = metadata.get("generation", 0) + 1
            kept.setdefault("spec", {}).setdefault("replicas", 1)
        self.objects[(kind.name, metadata["name"])] = kept
        return copy.deepcopy(kept)

    def _call(self, verb: str, kind: Kind, name: str) -> None:
        self.tries.append((verb, kind.name))
        fault = self.fault(verb, kind, name)
        if fault is not None:
            raise fault

    def _known(self, kind: Kind, name: str) -> Object:
        if (kind.name, name) not in self.objects:
            raise Gone(f"{kind.name} {name}", 404)
        return self.objects[(kind.name, name)]

    async def get(self, kind: Kind, namespace: str, name: str) -> Object:
        self._call("get", kind, name)
        return copy.deepcopy(self._known(kind, name))

    async def list(self, kind: Kind, namespace: str | None, selector: str | None = None) -> list[Object]:
        self._call("list", kind, "")
        return [copy.deepcopy(body) for (name, _), body in self.objects.items() if name == kind.name]

    async def create(self, kind: Kind, body: Object, *, dry_run: bool = False) -> Object:
        self._call("create", kind, body["metadata"]["name"])
        if (kind.name, body["metadata"]["name"]) in self.objects:
            raise Conflict("it exists", 409)
        return self.keep(kind, body)

    async def replace(self, kind: Kind, body: Object, *, subresource: str = "") -> Object:
        self._call(f"update {subresource}".strip(), kind, body["metadata"]["name"])
        known = self._known(kind, body["metadata"]["name"])
        if known["metadata"]["resourceVersion"] != body["metadata"]["resourceVersion"]:
            raise Conflict("it has changed", 409)
        return self.keep(kind, {**known, "status": body["status"]} if subresource else body)

    async def apply(self, kind: Kind, body: Object, *, manager: str) -> Object:
        name = body["metadata"]["name"]
        self._call("apply", kind, name)
        known = self.objects.get((kind.name, name), {"metadata": {}})
        metadata = {**known["metadata"], **body["metadata"]}
        spec = {"spec": {**known.get("spec", {}), **body["spec"]}} if "spec" in body else {}
        return self.keep(kind, {**known, **body, **spec, "metadata": metadata})

    async def apply_scale(
        self, kind: Kind, namespace: str, name: str, replicas: int, *, version: str, manager: str
    ) -> str:
        self._call("scale", kind, name)
        known = self._known(kind, name)
        if known["metadata"]["resourceVersion"] != version:
            raise Conflict("it has changed", 409)
        done = self.keep(kind, {**known, "spec": {**known["spec"], "replicas": replicas}})
        return str(done["metadata"]["resourceVersion"])

    async def merge(self, kind: Kind, namespace: str, name: str, patch: Mapping[str, Any], *, manager: str) -> Object:
        self._call("patch", kind, name)
        known = self._known(kind, name)
        metadata = {**known["metadata"], **patch.get("metadata", {})}
        return self.keep(kind, {**known, **patch, "metadata": metadata})

    async def delete(self, kind: Kind, namespace: str, name: str, *, uid: str | None = None) -> None:
        self._call("delete", kind, name)
        self.objects.pop((kind.name, name), None)


class Leader:
    """Always leads."""

    identity = "one_1"
    lease = ("home", "lease")
    is_leading = True
    term = 1

    @asynccontextmanager
    async def act(self) -> AsyncIterator[None]:
        yield


class PoolPasses:
    """A pool `demo`, and passes over it."""

    def __init__(self, **spec: Any) -> None:
        self.client, self.now_s = MemoryClient(), START_S
        self.suspected: list[tuple[str, Kind]] = []
        self.store = ObjectStore()
        client, leadership = cast("KubeClient", self.client), cast("Leadership", Leader())
        self.metrics = MetricsStore(clock=lambda: self.now_s)
        self.reconciler = Reconciler(
            PoolKey("default", "demo"),
            Context(
                client=client,
                store=self.store,
                leadership=leadership,
                applier=Applier(client, self.store, leadership),
                recorder=Recorder(client, leadership),
                metrics=self.metrics,
                budgets=Budgets(client, self.store, leadership, lambda: self.now_s),
                defaults=DEFAULTS,
                status_s=1.0,
                suspect=lambda *suspected: self.suspected.append(suspected),
                clock=lambda: self.now_s,
                steady=lambda: self.now_s,
            ),
        )
        self.client.keep(NAMESPACE, {"metadata": {"name": "default"}})
        body = pool_body("demo", **spec)
        body["metadata"] |= {"finalizers": [FINALIZER], "generation": 1}
        body["status"] = {"controllerClass": DEFAULTS.release}
        self.show(POOL, body)

    def show(self, kind: Kind, body: Mapping[str, Any]) -> None:
        """Make an object, or change it, as others do, and see it by a watch."""
        self.store.put(kind, self.client.keep(kind, body))

    def change(self, **spec: Any) -> None:
        """Change the pool's spec."""
        body = self.client.objects[(POOL.name, "demo")]
        self.show(POOL, {**body, "spec": {**body["spec"], **spec}})

    async def run(self, *, seconds: int = 1) -> str:
        """Make a pass a second; returns the result of the last one."""
        result = ""
        for _ in range(seconds):
            result = await self.reconciler.pass_once(is_dirty=False)
            self.now_s += 1
        return result

    @property
    def replicas(self) -> int:
        """The Deployment's."""
        found: int = self.client.objects[(DEPLOYMENT.name, "demo-engine")]["spec"]["replicas"]
        return found

    def condition(self, kind: str) -> Object:
        """A condition of the pool; {} before there is one."""
        status = self.client.objects[(POOL.name, "demo")].get("status") or {}
        return next((each for each in status.get("conditions") or [] if each["type"] == kind), {})

    def has(self, kind: Kind) -> bool:
        """Whether there is an object of a kind other than Pod."""
        return kind is not POD and any(name == kind.name for name, _ in self.client.objects)
