"""Server-side apply of a pool's objects, where they differ from what is wanted, and the owners of their fields, read
from `metadata.managedFields`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

from pagestream_operator.api import GROUP, EnginePool
from pagestream_operator.children.manifest import MANAGED_BY, MANAGER, POOL_LABEL, Manifest, digest
from pagestream_operator.errors import Blocked, Conflict, Gone
from pagestream_operator.kube.client import KubeClient
from pagestream_operator.kube.kinds import CONFIG_MAP, DEPLOYMENT, POOL, Kind, kind_of
from pagestream_operator.kube.lease import Leadership
from pagestream_operator.kube.store import ObjectKey, ObjectStore

SCALER = "pagestream-operator-scaling"
"""The field manager of replicas. It differs from that of all other fields, so that applying those never changes
replicas."""

_CONTENT = ("f:spec", "f:data")
_REPLICAS = ("f:spec", "f:replicas")
_RESTARTED = ("f:spec", "f:template", "f:metadata", "f:annotations", "f:kubectl.kubernetes.io/restartedAt")
"""Written by `kubectl rollout restart`, which is no drift."""

Fields = dict[str, Any]


def owns_replicas(live: Mapping[str, Any], manager: str) -> bool:
    """Whether `manager` has applied replicas."""
    return any(_has(entry.get("fieldsV1") or {}, _REPLICAS) for entry in _entries(live) if _applied_by(entry, manager))


def scaled_by(live: Mapping[str, Any]) -> list[str]:
    """Return the managers that own replicas by the scale."""
    return [
        str(entry.get("manager"))
        for entry in _entries(live)
        if entry.get("subresource") == "scale" and _has(entry.get("fieldsV1") or {}, _REPLICAS)
    ]


def taken_over(live: Mapping[str, Any]) -> list[Fields] | None:
    """Return managedFields in which the operator owns what other managers have put into the object's content.

    With them, server-side apply removes what isn't asked for; without, it keeps list entries and variables of other
    managers. None if other managers have put nothing in.
    """
    entries: list[Fields] = []
    foreign: Fields = {}
    for entry in copy.deepcopy(_entries(live)):
        fields = entry.get("fieldsV1") or {}
        if not _is_ours(entry):
            _merge(foreign, _take_content(fields))
        if fields:
            entries.append(entry)
    if not foreign:
        return None
    own = next((entry for entry in entries if _applied_by(entry, MANAGER)), None)
    if own is None:
        return None
    _merge(own["fieldsV1"], foreign)
    return entries


def _entries(live: Mapping[str, Any]) -> list[Fields]:
    return list(live["metadata"].get("managedFields") or [])


def _applied_by(entry: Mapping[str, Any], manager: str) -> bool:
    return entry.get("manager") == manager and entry.get("operation") == "Apply"


def _is_ours(entry: Mapping[str, Any]) -> bool:
    return bool(entry.get("subresource")) or entry.get("manager") in (MANAGER, SCALER)


def _take_content(fields: Fields) -> Fields:
    """Move the content out of `fields`, without the parts that other managers may own."""
    taken: Fields = {}
    for part in _CONTENT:
        if part not in fields:
            continue
        content = {part: fields.pop(part)}
        kept = [path for path in (_REPLICAS, _RESTARTED) if _has(content, path)]
        for path in kept:
            _remove(content, path)
            _merge(fields, _nested(path))
        if content.get(part):
            taken[part] = content[part]
    return taken


def _has(fields: Mapping[str, Any], path: tuple[str, ...]) -> bool:
    node: Any = fields
    for name in path:
        if not isinstance(node, Mapping) or name not in node:
            return False
        node = node[name]
    return True


def _remove(fields: Fields, path: tuple[str, ...]) -> None:
    """Remove a leaf, and the parents that are left with nothing but their own "."."""
    if len(path) > 1:
        _remove(fields[path[0]], path[1:])
        if not set(fields[path[0]]) - {"."}:
            del fields[path[0]]
    else:
        del fields[path[0]]


def _nested(path: tuple[str, ...]) -> Fields:
    return {path[0]: _nested(path[1:]) if len(path) > 1 else {}}


def _merge(into: Fields, other: Mapping[str, Any]) -> None:
    for name, value in other.items():
        if isinstance(value, Mapping):
            _merge(into.setdefault(name, {}), value)
        else:
            into[name] = value


def differs(wanted: Mapping[str, Any], live: Mapping[str, Any]) -> bool:
    """Whether any wanted field has another value in the object.

    Fields that aren't wanted don't count: the API server fills in defaults, and other managers own fields of their own.
    """
    return _differs(wanted, live)


def projection(wanted: Any, live: Any) -> Any:
    """Return the wanted fields with the values that the object has.

    The API server may rewrite a value ("1000m" of CPU becomes "1") or drop an unknown field.
    """
    if isinstance(wanted, Mapping):
        known = live if isinstance(live, Mapping) else {}
        return {name: projection(value, known[name]) for name, value in wanted.items() if name in known}
    if isinstance(wanted, Sequence) and not isinstance(wanted, str):
        found = live if isinstance(live, Sequence) and not isinstance(live, str) else []
        if len(found) != len(wanted):
            return list(found)
        return [projection(each, other) for each, other in zip(wanted, found, strict=True)]
    return live


def fingerprint(wanted: Mapping[str, Any], live: Mapping[str, Any]) -> str:
    """Digest of a manifest and of what the API server stored for it."""
    return digest([wanted, projection(wanted, live)])


def _differs(wanted: Any, live: Any) -> bool:
    if isinstance(wanted, Mapping):
        if not wanted:
            return bool(live)
        return not isinstance(live, Mapping) or any(_differs(value, live.get(name)) for name, value in wanted.items())
    if isinstance(wanted, Sequence) and not isinstance(wanted, str):
        if not wanted:
            return bool(live)
        return (
            not isinstance(live, Sequence)
            or len(live) != len(wanted)
            or any(_differs(each, other) for each, other in zip(wanted, live, strict=True))
        )
    return bool(wanted != live)


TERM_LABEL = f"{GROUP}/leader-term"
"""A label, since a changed annotation of a Deployment would count as a new generation of it."""
Live = Mapping[str, Any]


class Outcome(StrEnum):
    """What `Applier.apply` did with an object."""

    UNCHANGED = "unchanged"
    CREATED = "created"
    CHANGED = "changed"
    STAMPED = "stamped"
    """Only the leader's term was written."""


class Applier:
    """Applies manifests, and replicas through the scale.

    Every write is fenced by leadership and by the version of the object that it was derived from: it raises Conflict if
    the object has changed since, and NotLeading if this replica doesn't lead.
    """

    def __init__(self, client: KubeClient, store: ObjectStore, leadership: Leadership) -> None:
        self._client, self._store, self._leadership = client, store, leadership
        self._settled: dict[ObjectKey, str] = {}
        """Fingerprints of what the API server stored for a manifest: it rewrites values and drops unknown fields."""

    async def apply(self, pool: EnginePool, manifest: Manifest, *, replicas: int) -> Outcome:
        """Create or change an object so that it has what the manifest asks for.

        Args:
            manifest: what the object should have.
            replicas: those of a new Deployment; an existing one keeps its own.

        Raises:
            Blocked: an object of another owner has its name.
        """
        kind = kind_of(manifest["apiVersion"], manifest["kind"])
        name = manifest["metadata"]["name"]
        live = self._store.get(kind, pool.namespace, name) or await self._find(kind, pool.namespace, name)
        wanted = self._with_term(manifest) if kind is DEPLOYMENT else manifest
        key = ObjectKey(kind.name, pool.namespace, name)
        if live is None:
            self._settled[key] = fingerprint(wanted, await self._create(kind, wanted, replicas))
            return Outcome.CREATED
        _check_owner(pool, kind, live)
        if not live["metadata"].get("ownerReferences"):
            await self._check_not_deleted(pool)
        managed = taken_over(live)
        before = live
        is_settled = not differs(wanted, live) or self._settled.get(key) == fingerprint(wanted, live)
        if is_settled and managed is None:
            return Outcome.UNCHANGED
        if managed is not None:
            live = await self._take_over(kind, live, managed)
        if kind is DEPLOYMENT and owns_replicas(live, MANAGER):
            live = await self._hand_over_replicas(live)
        done = await self._apply(kind, wanted, live["metadata"]["resourceVersion"])
        self._settled[key] = fingerprint(wanted, done)
        is_same = fingerprint(manifest, before) == fingerprint(manifest, done)
        return Outcome.STAMPED if is_same else Outcome.CHANGED

    async def scale(self, deployment: Live, replicas: int) -> Live:
        """Set a Deployment's replicas through its scale; returns the changed Deployment."""
        metadata = deployment["metadata"]
        async with self._leadership.act():
            version = await self._client.apply_scale(
                DEPLOYMENT,
                metadata["namespace"],
                metadata["name"],
                replicas,
                version=metadata["resourceVersion"],
                manager=SCALER,
            )
        scaled = copy.deepcopy(dict(deployment))
        scaled["metadata"]["resourceVersion"] = version
        scaled["spec"]["replicas"] = replicas
        self._store.put(DEPLOYMENT, scaled)
        return scaled

    def forget(self, namespace: str, names: tuple[str, ...]) -> None:
        """Forget the fingerprints of objects of these names, and of ConfigMaps whose names begin with one of them."""
        prefixes = tuple(f"{name}-" for name in names)
        for key in [
            key
            for key in self._settled
            if key.namespace == namespace
            and (key.name in names or (key.kind == CONFIG_MAP.name and key.name.startswith(prefixes)))
        ]:
            del self._settled[key]

    async def _find(self, kind: Kind, namespace: str, name: str) -> Live | None:
        """Read an object past the store: one that has lost its labels isn't watched."""
        try:
            return await self._client.get(kind, namespace, name)
        except Gone:
            return None

    async def _check_not_deleted(self, pool: EnginePool) -> None:
        """Read the pool past the store before its object is owned again: `--cascade=orphan` has perhaps let it go."""
        found = await self._client.get(POOL, pool.namespace, pool.name)
        if found["metadata"]["uid"] != pool.uid or found["metadata"].get("deletionTimestamp") is not None:
            self._store.put(POOL, found)
            raise Conflict(f"{POOL.name} {pool.namespace}/{pool.name} is being deleted")

    async def _create(self, kind: Kind, wanted: Manifest, replicas: int) -> Live:
        if kind is not DEPLOYMENT:
            return await self._apply(kind, wanted, None)
        made = await self._apply(kind, {**wanted, "spec": {**wanted["spec"], "replicas": replicas}}, None)
        try:
            return await self._hand_over_replicas(made)
        except Conflict:
            return made  # its controller was faster; the next change hands them over

    async def _hand_over_replicas(self, deployment: Live) -> Live:
        """Make the scaler an owner of the replicas, unchanged, so that applying a manifest without them keeps them.

        Not through the scale: there the same number is no change, and changes no owner.
        """
        metadata = deployment["metadata"]
        body = {
            "apiVersion": DEPLOYMENT.api_version,
            "kind": DEPLOYMENT.name,
            "metadata": {name: metadata[name] for name in ("name", "namespace", "resourceVersion")},
            "spec": {"replicas": deployment["spec"]["replicas"]},
        }
        async with self._leadership.act():
            done = await self._client.apply(DEPLOYMENT, body, manager=SCALER)
        self._store.put(DEPLOYMENT, done)
        return done

    async def _apply(self, kind: Kind, wanted: Manifest, version: str | None) -> Live:
        body = wanted
        if version is not None:
            body = {**wanted, "metadata": {**wanted["metadata"], "resourceVersion": version}}
        async with self._leadership.act():
            done = await self._client.apply(kind, body, manager=MANAGER)
        self._store.put(kind, done)
        return done

    async def _take_over(self, kind: Kind, live: Live, managed: list[dict[str, Any]]) -> Live:
        metadata = live["metadata"]
        patch = {"metadata": {"resourceVersion": metadata["resourceVersion"], "managedFields": managed}}
        async with self._leadership.act():
            done = await self._client.merge(kind, metadata["namespace"], metadata["name"], patch, manager=MANAGER)
        self._store.put(kind, done)
        return done

    def _with_term(self, manifest: Manifest) -> Manifest:
        metadata = manifest["metadata"]
        labels = {**metadata["labels"], TERM_LABEL: str(self._leadership.term)}
        return {**manifest, "metadata": {**metadata, "labels": labels}}


def _check_owner(pool: EnginePool, kind: Kind, live: Live) -> None:
    metadata = live["metadata"]
    what = f"{kind.name} {metadata['namespace']}/{metadata['name']}"
    controllers = [owner for owner in metadata.get("ownerReferences") or [] if owner.get("controller")]
    if any(owner["uid"] != pool.uid for owner in controllers):
        raise Blocked(f"{what} belongs to {controllers[0]['kind']} {controllers[0]['name']} and must be gone first")
    known = metadata.get("labels") or {}
    if not controllers and known.get(MANAGED_BY) != MANAGER and known.get(POOL_LABEL) != pool.name:
        raise Blocked(f"{what} exists and isn't the operator's: rename or delete it, or choose another pool name")
