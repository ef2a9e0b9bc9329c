"""The objects as they were last seen. Watches fill it, so that reading it makes no call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from pagestream_operator.children.manifest import POOL_LABEL
from pagestream_operator.kube.kinds import POD, POOL, Kind
from pagestream_operator.kube.pods import Pod


class PoolKey(NamedTuple):
    """Namespace and name of a pool."""

    namespace: str
    name: str


class ObjectKey(NamedTuple):
    """Kind, namespace and name of an object."""

    kind: str
    namespace: str
    name: str


@dataclass(frozen=True, slots=True)
class Seen:
    """An object as it was last seen."""

    uid: str
    version: int
    body: Mapping[str, Any]


class ObjectStore:
    """A store for one event loop. It calls `on_change` with the pool that a changed object belongs to."""

    def __init__(self, on_change: Callable[[PoolKey], None] = lambda _: None) -> None:
        self._on_change = on_change
        self._objects: dict[ObjectKey, Seen] = {}
        self._pods: dict[PoolKey, dict[str, tuple[int, Pod]]] = {}

    def put(self, kind: Kind, body: Mapping[str, Any]) -> bool:
        """Store an object; returns False if a newer version is stored."""
        metadata = body["metadata"]
        version = int(metadata["resourceVersion"])
        pool = _pool_of(kind, metadata)
        if kind is POD:
            return self._put_pod(pool, version, body)
        key = ObjectKey(kind.name, metadata["namespace"], metadata["name"])
        known = self._objects.get(key)
        if known is not None and known.version > version:
            return False
        self._objects[key] = Seen(metadata["uid"], version, body)
        self._notify(pool)
        return True

    def drop(self, kind: Kind, body: Mapping[str, Any]) -> None:
        """Drop an object, unless another one has its name by now."""
        metadata = body["metadata"]
        pool = _pool_of(kind, metadata)
        if kind is POD:
            pods = self._pods.get(pool, {}) if pool is not None else {}
            known_pod = pods.get(metadata["name"])
            if known_pod is not None and known_pod[1].uid == metadata["uid"]:
                del pods[metadata["name"]]
        else:
            key = ObjectKey(kind.name, metadata["namespace"], metadata["name"])
            known = self._objects.get(key)
            if known is not None and known.uid == metadata["uid"]:
                del self._objects[key]
        self._notify(pool)

    def get(self, kind: Kind, namespace: str, name: str) -> Mapping[str, Any] | None:
        """The object as it was last seen; None if there is none."""
        seen = self._objects.get(ObjectKey(kind.name, namespace, name))
        return None if seen is None else seen.body

    def of_pool(self, kind: Kind, pool: PoolKey) -> list[Mapping[str, Any]]:
        """A pool's objects of a kind other than Pod."""
        return [
            seen.body
            for key, seen in self._objects.items()
            if key.kind == kind.name
            and key.namespace == pool.namespace
            and _pool_of(kind, seen.body["metadata"]) == pool
        ]

    def pods(self, pool: PoolKey) -> list[Pod]:
        """A pool's pods, by name."""
        return [pod for _, (_, pod) in sorted(self._pods.get(pool, {}).items())]

    def pools(self) -> list[PoolKey]:
        """All pools."""
        return [PoolKey(key.namespace, key.name) for key in self._objects if key.kind == POOL.name]

    def uids(self, kind: Kind, namespace: str | None) -> set[str]:
        """The uids of all objects of a kind in a namespace, or in all."""
        if kind is POD:
            return {
                pod.uid
                for pool, pods in self._pods.items()
                for _, pod in pods.values()
                if namespace in (None, pool.namespace)
            }
        return {
            seen.uid
            for key, seen in self._objects.items()
            if key.kind == kind.name and namespace in (None, key.namespace)
        }

    def settle(self, kind: Kind, listed: Iterable[Mapping[str, Any]], suspects: set[str]) -> int:
        """Store a fresh list, and drop the objects that no longer exist.

        Args:
            listed: the objects that exist.
            suspects: uids that were stored before the list was requested; those that it lacks are dropped.

        Returns:
            The number of dropped objects.
        """
        found = list(listed)
        for body in found:
            self.put(kind, body)
        gone = suspects - {body["metadata"]["uid"] for body in found}
        for key, seen in [(key, seen) for key, seen in self._objects.items() if seen.uid in gone]:
            if key.kind == kind.name:
                del self._objects[key]
                self._notify(_pool_of(kind, seen.body["metadata"]))
        if kind is POD:
            for pool, pods in self._pods.items():
                for name in [name for name, (_, pod) in pods.items() if pod.uid in gone]:
                    del pods[name]
                    self._notify(pool)
        return len(gone)

    def _put_pod(self, pool: PoolKey | None, version: int, body: Mapping[str, Any]) -> bool:
        if pool is None:
            return False
        pods = self._pods.setdefault(pool, {})
        known = pods.get(body["metadata"]["name"])
        if known is not None and known[0] > version:
            return False
        pods[body["metadata"]["name"]] = (version, Pod.from_object(body))
        self._notify(pool)
        return True

    def _notify(self, pool: PoolKey | None) -> None:
        if pool is not None:
            self._on_change(pool)


def _pool_of(kind: Kind, metadata: Mapping[str, Any]) -> PoolKey | None:
    if kind is POOL:
        return PoolKey(metadata["namespace"], metadata["name"])
    name = (metadata.get("labels") or {}).get(POOL_LABEL)
    return None if name is None else PoolKey(metadata["namespace"], name)
