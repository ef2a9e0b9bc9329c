"""The objects as they were last seen. Watches fill it, so that reading it makes no call."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from pagestream_operator.children.manifest import POOL_LABEL
from pagestream_operator.errors import Unreadable
from pagestream_operator.fields import mapping, nested, text
from pagestream_operator.kube.kinds import POD, POOL, Kind
from pagestream_operator.kube.pods import Pod

logger = logging.getLogger(__name__)

_ODDITIES_KEPT = 256
"""Objects that can't be read and are remembered for their pools; the oldest is forgotten first."""


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
    pool: PoolKey | None
    body: Mapping[str, Any] | Pod


@dataclass(frozen=True, slots=True)
class ListChanges:
    """What a fresh list has changed in the store."""

    dropped: int
    """Objects that don't exist any more."""
    rewound: int
    """Objects that are older than the store had them: the API server's data was restored from a backup."""


class ObjectStore:
    """A store for one event loop. It calls `on_change` with the pool that a changed object belongs to.

    An object that can't be read harms no other: it is logged, counted in `unreadable`, and listed in `oddities` of its
    pool, as are pods of which a field can't be read.
    """

    def __init__(self, on_change: Callable[[PoolKey], None] = lambda _: None) -> None:
        self._on_change = on_change
        self._objects: dict[str, dict[ObjectKey, Seen]] = defaultdict(dict)
        """By the kind's name."""
        self._pods: dict[PoolKey, dict[str, Pod]] = defaultdict(dict)
        self._oddities: dict[ObjectKey, tuple[PoolKey | None, str]] = {}
        self.unreadable: Counter[str] = Counter()
        """By kind: how often an object was shown that can't be read, or not as a whole."""

    def put(self, kind: Kind, body: Mapping[str, Any]) -> bool:
        """Store an object; returns False if a newer version is stored, or if it can't be read."""
        key = _key_of(kind, body)
        seen = self._read(kind, key, body)
        return seen is not None and self._keep(kind, key, seen, is_forced=False)

    def drop(self, kind: Kind, body: Mapping[str, Any]) -> None:
        """Drop an object, unless another one has its name by now."""
        key = _key_of(kind, body)
        known = self._objects[kind.name].get(key)
        if known is None:
            self._oddities.pop(key, None)
        elif known.uid == nested(body, "metadata", "uid"):
            self._remove(kind, key, known)
        self._notify(_pool_of(kind, body))

    def get(self, kind: Kind, namespace: str, name: str) -> Mapping[str, Any] | None:
        """The object, which is no pod, as it was last seen; None if there is none."""
        seen = self._objects[kind.name].get(ObjectKey(kind.name, namespace, name))
        return None if seen is None else mapping(seen.body)

    def of_pool(self, kind: Kind, pool: PoolKey) -> list[Mapping[str, Any]]:
        """A pool's objects of a kind other than Pod."""
        return [mapping(seen.body) for seen in self._objects[kind.name].values() if seen.pool == pool]

    def pods(self, pool: PoolKey) -> list[Pod]:
        """A pool's pods, by name."""
        return [pod for _, pod in sorted(self._pods.get(pool, {}).items())]

    def pools(self) -> list[PoolKey]:
        """All pools."""
        return [PoolKey(key.namespace, key.name) for key in self._objects[POOL.name]]

    def oddities(self, pool: PoolKey) -> list[str]:
        """What can't be read of a pool's objects, a sentence each."""
        return sorted(sentence for owner, sentence in self._oddities.values() if owner == pool)

    def versions(self, kind: Kind, namespace: str | None) -> dict[str, int]:
        """The versions of all objects of a kind in a namespace, or in all, by uid."""
        known = self._objects[kind.name].items()
        return {seen.uid: seen.version for key, seen in known if namespace in (None, key.namespace)}

    def apply_list(self, kind: Kind, listed: Iterable[Mapping[str, Any]], suspects: Mapping[str, int]) -> ListChanges:
        """Store a fresh list, and drop the objects that no longer exist.

        The list wins over what was stored before it was requested, whatever the versions say: they begin again lower
        when the API server's data is restored from a backup. What a watch or a write has brought since is newer.

        Args:
            listed: the objects that exist.
            suspects: `versions` before the list was requested; the objects that it lacks are dropped.
        """
        found: set[str] = set()
        rewound = 0
        for body in listed:
            found.add(text(nested(body, "metadata", "uid")))
            key = _key_of(kind, body)
            seen, known = self._read(kind, key, body), self._objects[kind.name].get(key)
            if seen is None:
                continue
            is_older = known is not None and known.version > seen.version and suspects.get(known.uid) == known.version
            rewound += is_older
            self._keep(kind, key, seen, is_forced=is_older)
        gone = set(suspects) - found
        dropped = [(key, seen) for key, seen in self._objects[kind.name].items() if seen.uid in gone]
        for key, seen in dropped:
            self._remove(kind, key, seen)
            self._notify(seen.pool)
        return ListChanges(len(dropped), rewound)

    def _read(self, kind: Kind, key: ObjectKey, body: Mapping[str, Any]) -> Seen | None:
        """Read an object as it is kept; None where it can't be read."""
        pool = _pool_of(kind, body)
        try:
            uid, version = _identity_of(key, body)
            seen = Seen(uid, version, pool, Pod.from_object(body) if kind is POD else body)
        except Exception as error:  # noqa: BLE001 - whatever an object has, it must not stop the reading of the others
            self._note(kind, key, pool, f"it can't be read ({error or type(error).__name__})")
            return None
        if isinstance(seen.body, Pod) and seen.body.oddities:
            self._note(kind, key, pool, "; ".join(seen.body.oddities))
        else:
            self._oddities.pop(key, None)
        return seen

    def _note(self, kind: Kind, key: ObjectKey, pool: PoolKey | None, what: str) -> None:
        """Remember what can't be read, and log it once."""
        sentence = f"{kind.name} {key.namespace}/{key.name}: {what}"
        self.unreadable[kind.name] += 1
        if self._oddities.get(key) == (pool, sentence):
            return
        logger.warning("an object can't be read, or not as a whole: %s", sentence)
        while len(self._oddities) >= _ODDITIES_KEPT:
            del self._oddities[next(iter(self._oddities))]
        self._oddities[key] = (pool, sentence)
        self._notify(pool)

    def _keep(self, kind: Kind, key: ObjectKey, seen: Seen, *, is_forced: bool) -> bool:
        known = self._objects[kind.name].get(key)
        if known is not None and known.version > seen.version and not is_forced:
            return False
        if known is not None and known.pool != seen.pool:  # somebody has changed its label
            self._remove(kind, key, known)
            self._notify(known.pool)
        if isinstance(seen.body, Pod):
            if seen.pool is None:
                return False
            self._pods[seen.pool][key.name] = seen.body
        self._objects[kind.name][key] = seen
        self._notify(seen.pool)
        return True

    def _remove(self, kind: Kind, key: ObjectKey, seen: Seen) -> None:
        del self._objects[kind.name][key]
        self._oddities.pop(key, None)
        if isinstance(seen.body, Pod) and seen.pool is not None:
            del self._pods[seen.pool][key.name]
            if not self._pods[seen.pool]:
                del self._pods[seen.pool]

    def _notify(self, pool: PoolKey | None) -> None:
        if pool is not None:
            self._on_change(pool)


def _key_of(kind: Kind, body: object) -> ObjectKey:
    """Kind, namespace and name of an object; empty where it has none."""
    namespace, name = (text(nested(body, "metadata", field)) for field in ("namespace", "name"))
    return ObjectKey(kind.name, namespace, name)


def _identity_of(key: ObjectKey, body: object) -> tuple[str, int]:
    """The uid and version of an object. Unreadable where it lacks what every object has."""
    uid, version = (text(nested(body, "metadata", field)) for field in ("uid", "resourceVersion"))
    if not (key.namespace and key.name and uid):
        raise Unreadable("it lacks a namespace, a name or a uid")
    if not (version.isascii() and version.isdecimal()):
        raise Unreadable(f"its resourceVersion is {version!r}, a number is expected")
    return uid, int(version)


def _pool_of(kind: Kind, body: object) -> PoolKey | None:
    """The pool that an object belongs to, by its label."""
    namespace = text(nested(body, "metadata", "namespace"))
    path = ("name",) if kind is POOL else ("labels", POOL_LABEL)
    name = text(nested(body, "metadata", *path))
    return PoolKey(namespace, name) if namespace and name else None
