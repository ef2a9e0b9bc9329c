"""Field owners of an object, read from `metadata.managedFields`."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from pagestream_operator.children.manifest import MANAGER

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
